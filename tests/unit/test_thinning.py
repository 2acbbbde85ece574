"""Of tests of which a sample runs, which cases that is, and when all of them run."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import reach, thinning
from tests.thinning import Choice, Line, choose, renewed, spread


class Case:
    """What is looked at of a test item."""

    def __init__(self, path: str, function: str, name: str, *, marked: bool = True, **keywords: int) -> None:
        self.nodeid, self.originalname, self.name = f"{path}::{function}[{name}]", function, name
        self.callspec = SimpleNamespace(id=name)
        self._mark = SimpleNamespace(kwargs=keywords) if marked else None

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return self._mark


def thinned(items: list[Case], choice: Choice = thinning.UNCHANGED) -> tuple[list[Case], list[Case]]:
    given: Any = items
    found: Any = thinning.thinned(given, choice)
    return found


@pytest.mark.parametrize(
    ("n", "keep", "kept"), [(1, 2, "0"), (2, 2, "01"), (9, 2, "08"), (9, 3, "048"), (5, 1, "0"), (3, 0, "")]
)
def test_cases_are_spread_from_the_first_to_the_last(n: int, keep: int, kept: str) -> None:
    items = [Case("a.py", "test_f", str(i), keep=keep) for i in range(n)]
    found, left = thinned(items)
    assert "".join(one.name for one in found) == kept
    assert len(found) + len(left) == n


def test_the_cases_kept_have_every_value_of_every_parameter() -> None:
    matrix = [f"{a}-{b}-{c}" for a in "xy" for b in "123" for c in "pqr"]
    found, _ = thinned([Case("a.py", "test_f", one, keep=3) for one in matrix])
    assert {part for one in found for part in one.name.split("-")} == set("xy123pqr")


def test_one_of_each_value_comes_before_distance() -> None:
    assert spread([("f", one) for one in ("a1", "a2", "a1", "a1")], 2) == {0, 1}


def test_others_stay_and_so_do_those_of_files_that_run_whole() -> None:
    items = [
        Case(path, "test_f", str(i), marked=path != "c.py")
        for path in ("a.py", "b.py", "c.py")
        for i in range(5)
    ]
    _, left = thinned(items, Choice(("b.py",), ()))
    assert [one.nodeid for one in left] == [f"a.py::test_f[{i}]" for i in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({}, ["test_f[0-x]", "test_f[2-x]", "test_g[3-x]"]),
        ({"together": True}, ["test_f[0-x]", "test_g[3-x]"]),
    ],
)
def test_a_file_s_functions_are_sampled_together(more: dict[str, int], kept: list[str]) -> None:
    """And each by itself where the file has changed since every case ran, and there was no time."""
    keep = {"test_f": 2 if more else 3, "test_g": 1}
    items = [Case("a.py", f, f"{i}-x", keep=n, **more) for f, n in keep.items() for i in range(4)]
    other = Case("b.py", "test_f", "0-x")
    found, _ = thinned([*items, other])
    assert [one.nodeid for one in found] == [*(f"a.py::{one}" for one in kept), "b.py::test_f[0-x]"]
    found, _ = thinned(items, Choice((), ("a.py",)))
    assert [one.originalname for one in found] == [*["test_f"] * (1 if more else 3), "test_g"]
    assert thinned(items, Choice(("a.py",), ())) == (items, [])


@pytest.mark.parametrize("is_together", [False, True])
def test_every_function_is_kept_unless_they_are_one(*, is_together: bool) -> None:
    items = [Case("a.py", f"test_{f}", "x", keep=2, together=is_together) for f in "abcde"]
    found, _ = thinned(items)
    assert len(found) == (2 if is_together else 5)


def test_each_model_of_a_file_is_kept_once_by_some_function() -> None:
    items = [Case("a.py", f, name) for f in ("test_f", "test_g", "test_h") for name in "xyz"]
    found, _ = thinned(items)
    assert {one.name for one in found} == {*"xyz"}
    assert {one.originalname for one in found} == {"test_f", "test_g", "test_h"}


def test_files_that_changed_run_whole_as_far_as_there_is_time() -> None:
    known = {"a": Line("1", 30), "b": Line("1", 10), "c": Line("1", 25), "d": Line("1", 5)}
    now = {"a": "2", "b": "2", "c": "2", "d": "1"}
    assert choose(known, now, 100) == Choice(("b", "c", "a"), ())
    assert choose(known, now, 40) == Choice(("b", "c"), ("a",))
    assert choose(known, now, 0) == Choice((), ("a", "b", "c"))
    assert choose(known, {"d": "1"}, 100) == Choice((), ())
    assert choose(known, {"new": "1"}, thinning.UNKNOWN_S) == Choice(("new",), ())


def test_the_record_comes_back_and_changes_little(tmp_path: Path) -> None:
    record = tmp_path / "record.txt"
    assert thinning.recorded(record) == {}
    known = {"b": Line("1", 10), "a": Line("1", 3), "gone": Line("1", 9), "tests/conftest.py": Line("1", 7)}
    thinning.write(known, record)
    assert [line.split()[0] for line in record.read_text().splitlines()] == sorted(known)
    assert thinning.recorded(record) == known
    run = {"a": Line("2", 5.5), "b": Line("2", 21.4), "new": Line("1", 0.2)}
    found = renewed(known, run)
    assert found.pop("tests/conftest.py") == known["tests/conftest.py"]
    assert found == {"a": Line("2", 3), "b": Line("2", 21), "new": Line("1", 1)}


def test_every_line_of_the_record_is_of_a_file() -> None:
    assert not [path for path in thinning.recorded() if not (thinning.ROOT / path).is_file()]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A test that names an operator, a module of the engine through a package, and cases of another test."""
    for path in (
        "kernels/norm/cpu.py",
        "kernels/norm/norm.cu",
        "kernels/norm/notes.md",
        "kernels/moe/cpu.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    for path in (
        "engine/core/plan.py",
        "engine/core/seats.py",
        "tests/cases.py",
        "tests/other.py",
        "server/serve.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("import slipstream.kernels.moe.cpu")
    (tmp_path / "tests/test_a.py").write_text(
        "import torch\nfrom slipstream.engine.core import plan\nfrom tests.cases import CASES\n"
        "ABOUT = ('server/*.py',)\n"
        "def test_a():\n    from slipstream.kernels.norm.cpu import norm\n"
    )
    return tmp_path


def test_a_test_is_about_what_it_names(tree: Path) -> None:
    found = [path.relative_to(tree).as_posix() for path in reach.subjects(tree / "tests/test_a.py", tree)]
    assert found == [
        *("tests/test_a.py", "engine/core/plan.py"),
        *("kernels/norm/cpu.py", "kernels/norm/norm.cu", "server/serve.py", "tests/cases.py"),
    ]


@pytest.mark.parametrize(
    ("path", "is_noticed"),
    [
        *(("tests/test_a.py", True), ("kernels/norm/norm.cu", True), ("tests/cases.py", True)),
        *(("kernels/norm/notes.md", False), ("engine/core/seats.py", False), ("kernels/moe/cpu.py", False)),
    ],
)
def test_a_changed_subject_is_noticed(tree: Path, path: str, is_noticed: bool) -> None:
    before = reach.digest(tree / "tests/test_a.py", tree)
    reach._digest.cache_clear()
    with (tree / path).open("a") as file:
        file.write("\n# changed\n")
    assert (reach.digest(tree / "tests/test_a.py", tree) != before) == is_noticed


def test_a_renamed_subject_is_noticed(tree: Path) -> None:
    before = reach.digest(tree / "tests/test_a.py", tree)
    (tree / "kernels/norm/norm.cu").rename(tree / "kernels/norm/other.cu")
    assert reach.digest(tree / "tests/test_a.py", tree) != before


def test_tests_of_operators_are_about_their_sources() -> None:
    """In the tree as it is."""
    named = {
        path.relative_to(reach.ROOT).as_posix()
        for path in reach.subjects(reach.ROOT / "tests/oracle/test_cuda_attention.py")
    }
    assert {
        "kernels/attention/attention.cu",
        "tests/emulator/driver.cpp",
        "tests/oracle/test_kernels.py",
    } <= named
    assert "kernels/moe/op.py" not in named


def test_every_declared_pattern_has_files() -> None:
    for test in sorted((reach.ROOT / "tests").rglob("test_*.py")):
        for pattern in reach._declared(ast.parse(test.read_text(encoding="utf-8"))):
            assert any(reach.ROOT.glob(pattern)), f"{test.name}: {pattern}"
