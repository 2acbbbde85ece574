"""The demo's tasks: correct renames, a clean split, and the same draw for the same seed."""

from __future__ import annotations

import ast
import random

import pytest

from demo import heldout, tasks

MODULE = '''
class Box:
    def area(self, width, height):
        """Return the area.

        Never negative."""
        size = width * height
        if size < 0:
            return -size
        return size

def named(value, *, key=None):
    other = dict(key=value)
    return other.value, value
'''


@pytest.fixture
def found() -> list[tasks.Function]:
    return list(tasks.functions_of("box.py", MODULE))


def test_functions_are_dedented_and_parse(found: list[tasks.Function]) -> None:
    assert [ast.parse(function.source).body[0].name for function in found] == ["named", "area"]
    assert all(function.source.startswith("def ") for function in found)


def test_only_names_that_are_always_the_variable_are_renamable(found: list[tasks.Function]) -> None:
    named, area = found
    # `value` is an attribute too, `key` a keyword argument, `self` conventional.
    assert named.renamable == ("other",)
    assert area.renamable == ("height", "size", "width")


def test_rename_reference_is_the_prompted_function_renamed(found: list[tasks.Function]) -> None:
    task = tasks.rename_task(found[1], random.Random(3))
    request, source = task.prompt_messages[0]["content"].split("\n", 1)
    old, new = request.split("`")[1::2]
    assert source == found[1].source
    assert old in source
    assert new not in source
    assert tasks.rename(source, old, new) == task.reference
    before, after = ast.dump(ast.parse(source)), ast.dump(ast.parse(task.reference))
    assert before.replace(f"'{old}'", f"'{new}'") == after


def test_continue_and_docstring_split_the_function(found: list[tasks.Function]) -> None:
    task = tasks.continue_task(found[1], random.Random(0))
    shown = task.prompt_messages[0]["content"].split("\n", 1)[1]
    assert f"{shown}\n{task.reference}" == found[1].source
    task = tasks.docstring_task(found[1])
    assert task.reference == "Return the area.\n\nNever negative."
    assert '"""' not in task.prompt_messages[0]["content"]
    with pytest.raises(ValueError, match="no docstring"):
        tasks.docstring_task(found[0])


def test_a_seed_gives_the_same_tasks(found: list[tasks.Function]) -> None:
    def drawn(seed: int) -> list[tasks.Task]:
        rng = random.Random(seed)
        return [tasks.rename_task(found[1], rng) for _ in range(20)]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_new_identifiers_are_fresh_names() -> None:
    rng = random.Random(0)
    names = [tasks.new_identifier("def zone(total): ...", rng) for _ in range(500)]
    assert all(name.isidentifier() and name not in tasks.RESERVED for name in names)
    assert not {"zone", "total"} & set(names)
    assert len(set(names)) > 400


def test_splits_are_disjoint_by_module() -> None:
    assert tasks.module_split("contextlib.py") == "heldout"
    assert tasks.module_split("json/decoder.py") == "train"
    assert tasks.module_split("idlelib/idle_test/test_history.py") == "train"
    train, held = (set(map(str, tasks.modules(split))) for split in ("train", "heldout"))
    assert train
    assert held
    assert not train & held


def test_the_committed_tasks_hold_what_they_promise() -> None:
    held = heldout.load()
    assert len({task.id for task in held}) == len(held)
    assert [len(heldout.load(kind)) for kind in ("rename", "continue", "docstring")] == [60, 40, 40]
    for entry in heldout.load("rename"):
        request, source = entry.task.prompt_messages[0]["content"].split("\n", 1)
        old, new = request.split("`")[1::2]
        assert tasks.rename(source, old, new) == entry.task.reference
        assert (source.count("\n") + 1 > heldout.SHORT_LINES) == (entry.length == "long")
        ast.parse(entry.task.reference)
