"""`make bench` as a whole at tiny sizes: every part, the files, the plots, and what becomes of parts that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.bench import page, plots, report, run
from tests.gpu.setting import Finding, Findings

QUICK = ("--quick", "--device", "cpu", "--model", "demo", "--no-plots", "--out")
PAGE = f"# Performance\n\nBefore.\n\n{page.START}\nstale\n{page.END}\n\nBehind.\n"


def found_in(folder: Path) -> dict[str, Any]:
    """What the JSON says; it keeps to its schema, and the tables beside it have all of its findings."""
    (path,) = folder.glob("bench-*.json")
    data: dict[str, Any] = json.loads(path.read_text())
    jsonschema.validate(data, report.SCHEMA)
    assert path.stem.endswith(data["when"][:10])
    tables = path.with_suffix(".md").read_text()
    assert all(f"| {one['name']} |" in tables for one in data["findings"])
    return data


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of every part, without matplotlib."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        assert run.main([*QUICK, str(folder), "--parts", *run.PARTS]) == 0
    return found_in(folder)


def figures(data: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return [one["figures"] for one in data["findings"] if one["part"] == part]


@pytest.mark.sampled(keep=0)
def test_every_part_finds_something(whole: dict[str, Any]) -> None:
    assert {one["part"] for one in whole["findings"]} == set(run.PARTS)
    assert all(value > 0 for one in figures(whole, "ceilings") for value in one.values())
    assert whole["models"]["demo"]["million parameters"] > 1
    assert whole["versions"]["torch"] != "not installed"
    assert not [one for one in figures(whole, "peers") if "why" in one]


@pytest.mark.sampled(keep=0)
def test_plain_decoding_is_what_all_else_is_measured_by(whole: dict[str, Any]) -> None:
    for one in figures(whole, "drafters"):
        if one["drafter"] == "plain":
            assert (one["x plain"], one["tokens a pass"]) == (1.0, 1.0)
    by_drafter = {one["drafter"]: one for one in figures(whole, "drafters") if one["task"] == "rename"}
    assert by_drafter["suffix"]["tokens a pass"] > 1.5
    assert by_drafter["random guesses, always"]["tokens a pass"] < 1.2
    nothing_to_guess = [one for one in figures(whole, "drafters") if one["task"] == "random"]
    assert all(one["tokens a pass"] < 1.2 for one in nothing_to_guess)
    assert {one["x one row"] for one in figures(whole, "width") if one["rows"] == 1} == {1.0}


@pytest.mark.sampled(keep=0)
def test_a_prefix_hit_changes_no_draft(whole: dict[str, Any]) -> None:
    for one in figures(whole, "acceptance"):
        assert one["after a hit"] == pytest.approx(one["tokens a pass"], rel=0.05)
        assert 0.3 < one["cached"] < 1


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(scene: object) -> Findings:
        raise RuntimeError("a part that raises")
        yield

    def finds(scene: object) -> Findings:
        yield Finding("a figure", None, {"is": 1.0})

    monkeypatch.setattr(run, "PARTS", {"ceilings": raises, "width": finds})
    arguments = [*QUICK, str(tmp_path), "--parts", "ceilings", "width"]
    assert run.main(arguments) == 1
    before = found_in(tmp_path)
    assert [one["ok"] for one in before["findings"]] == [False, None]
    assert "a part that raises" in before["findings"][0]["figures"]["why"]

    (path,) = tmp_path.glob("*.json")
    monkeypatch.setattr(run, "PARTS", {"ceilings": finds, "width": raises})
    assert run.main([*arguments, "--resume", str(path)]) == 0
    after = found_in(tmp_path)
    assert {one["part"]: one["name"] for one in after["findings"]} == {
        "ceilings": "a figure",
        "width": "a figure",
    }
    assert after["seconds"] >= before["seconds"]
    assert after["command"].startswith(before["command"] + "; make bench")


def test_a_model_that_is_not_known_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--model", "70B", "--device", "cpu", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "--model 70B" in said
    assert "0.44B" in said


@pytest.mark.parametrize("peer", ["http://127.0.0.1:1", "name=127.0.0.1:1", "=http://127.0.0.1:1"])
def test_a_peer_has_a_name_and_an_address(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--peer", peer])
    assert "NAME=http" in capsys.readouterr().err


@pytest.mark.sampled(keep=0)
def test_a_page_is_renewed_between_its_marks(whole: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra [bench] is not installed")
    path = tmp_path / "performance.md"
    path.write_text(PAGE)
    others = [{**one, "model": "another"} for one in whole["findings"]]
    page.renew(path, {**whole, "findings": [*whole["findings"], *others]})
    text = path.read_text()
    assert text.startswith("# Performance\n\nBefore.\n\n" + page.START)
    assert text.endswith(page.END + "\n\nBehind.\n")
    assert "stale" not in text
    assert whole["command"] in text
    for name in plots.QUESTIONS:
        assert f"(performance/{name}.png)" in text
        image = (tmp_path / "performance" / f"{name}.png").read_bytes()
        assert image.startswith(b"\x89PNG")
        assert 4000 < len(image) < 60_000
    assert (tmp_path / "performance" / "figures.md").exists()
    path.write_text("# Performance\n")
    with pytest.raises(ValueError, match="no <!-- results -->"):
        page.renew(path, whole)


def test_the_page_of_the_docs_has_its_marks() -> None:
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert text.count(page.START) == text.count(page.END) == 1
