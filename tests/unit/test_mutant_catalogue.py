"""The catalogue of planted faults fits the tree as it is now. `make mutants` plants them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests import reach
from tests.mutants.catalogue import ROOT, Fault, faults

CATALOGUE = list(faults())


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda one: one.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    planted = fault.planted()
    assert planted != (ROOT / fault.file).read_text(encoding="utf-8")
    if fault.file.endswith(".py"):
        compile(planted, fault.file, "exec")
    assert fault.why.endswith(".")
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("[")[0].partition("::")
        assert not name or name in functions_of(ROOT / path), test


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


def test_samples_of_few_cases_notice_that_a_fault_was_planted() -> None:
    """A file of which a few cases run while nothing changed is about each source that its faults are planted in."""
    named = {ROOT / test.partition("::")[0] for fault in CATALOGUE for test in fault.tests}
    about = {
        path: set(reach.subjects(path))
        for path in named
        if "together=True" in path.read_text(encoding="utf-8")
    }
    for fault in CATALOGUE:
        for path in {ROOT / test.partition("::")[0] for test in fault.tests} & about.keys():
            assert ROOT / fault.file in about[path], f"{fault.name}: {path.name}"


def test_there_are_faults_of_every_room() -> None:
    assert len(CATALOGUE) == len({one.name for one in CATALOGUE}) >= 80
    tops = {Path(one.file).parts[:2] for one in CATALOGUE}
    assert {("engine", room) for room in ("core", "speculate", "sample", "cache", "layers", "text")} <= tops
    assert {("kernels", "choose"), ("kernels", "moe"), ("server", "openai"), ("server", "http")} <= tops


def test_a_text_that_is_not_there_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    fault = Fault(name="twice", file="a.py", old="x = 1", new="x = 2", why="", tests=())
    with pytest.raises(ValueError, match=r"twice: the text to replace stands 2 times in a\.py"):
        fault.planted(tmp_path)
