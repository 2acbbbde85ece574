"""Of tests of which a sample runs, which cases that is, and when all of them run."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import thinning


class Case:
    """What is looked at of a test item."""

    path = Path("tests/test_a.py")

    def __init__(self, function: str, name: str, group: str | None, **keywords: int) -> None:
        self.originalname, self.name = function, name
        self._mark = None if group is None else SimpleNamespace(args=(group,), kwargs=keywords)

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return self._mark


def thinned(items: list[Case], whole: Collection[str]) -> tuple[list[Case], list[Case]]:
    given: Any = items
    found: Any = thinning.thinned(given, whole)
    return found


@pytest.mark.parametrize(
    ("n", "keep", "kept"), [(1, 2, "0"), (2, 2, "01"), (9, 2, "08"), (9, 3, "048"), (5, 1, "0")]
)
def test_cases_are_spread_from_the_first_to_the_last(n: int, keep: int, kept: str) -> None:
    items = [Case("test_f", str(i), "cuda", keep=keep) for i in range(n)]
    found, left = thinned(items, ())
    assert "".join(one.name for one in found) == kept
    assert len(found) + len(left) == n


def test_others_stay_and_so_do_those_whose_sources_changed() -> None:
    items = [Case(f"test_{group}", str(i), group) for group in ("cuda", "triton", None) for i in range(5)]
    found, left = thinned(items, {"triton"})
    assert [one.originalname for one in left] == ["test_cuda"] * 3
    assert [one.name for one in found if one.originalname == "test_None"] == list("01234")


def test_every_mark_names_a_group() -> None:
    tests = [path for path in Path(thinning.__file__).parent.rglob("test_*.py") if path != Path(__file__)]
    named = {
        part.split('"')[1]
        for path in tests
        for part in path.read_text().split("mark.sampled(")[1:]
        if part[0] == '"'
    }
    assert named == set(thinning.GROUPS)
    assert all(len(list(thinning.sources(group))) for group in thinning.GROUPS)


def test_a_changed_source_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(thinning, "ROOT", tmp_path)
    monkeypatch.setattr(thinning, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(thinning, "GROUPS", {"a": ("a/*.py",), "b": ("b/*.py",)})
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.py").write_text("x")
    assert thinning.changed() == {"a", "b"}
    (tmp_path / "record.json").write_text(json.dumps({name: thinning.digest(name) for name in "ab"}))
    assert thinning.changed() == frozenset()
    (tmp_path / "b" / "two.py").write_text("")
    assert thinning.changed() == {"b"}
    (tmp_path / "a" / "one.py").rename(tmp_path / "a" / "other.py")
    assert thinning.changed() == {"a", "b"}
