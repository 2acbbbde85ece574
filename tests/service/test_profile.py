"""`slipstream profile` on the demo model: figures that fit together, a trace that a reader takes, refusals by name."""

from __future__ import annotations

import errno
import gzip
import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pytest

from slipstream.engine.core.clock import PARTS
from slipstream.engine.errors import StepFailed
from slipstream.server.command.cli import dispatch
from slipstream.server.command.profile_table import table
from tests.service.test_engine_contract import DEMO

TARGET, DRAFT = str(DEMO / "target"), str(DEMO / "draft")
N_TASKS, N_TOKENS = 2, 6
SLACK_US = 1000.0  # by which the two clocks of a trace may differ


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile") / "trace.json"


@pytest.fixture(scope="module")
def told(out: Path) -> dict[str, Any]:
    """One profile, with a trace in `out`."""
    flags = ["-m", TARGET, "-md", DRAFT, "-t", "1", "--tokens", str(N_TOKENS), "--trace", str(out), "--json"]
    flags += ["--spec-type", "draft-model", "--no-spec-adaptive"]  # or it may not be asked
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr("sys.stdout.write", written.append)
        assert dispatch(["profile", *flags, "--tasks", str(N_TASKS)], {}) == 0
    found: dict[str, Any] = json.loads("".join(written))
    return found


def test_the_runs_are_the_same_requests(told: dict[str, Any]) -> None:
    assert [(run["kind"], run["n_slots"]) for run in told["runs"]] == [
        *(("plain", 1), ("drafts", 1), ("plain", 2), ("drafts", 2))
    ]
    assert {run["n_tokens"] for run in told["runs"]} == {told["runs"][0]["n_tokens"]}
    assert N_TASKS <= told["runs"][0]["n_tokens"] <= N_TASKS * N_TOKENS
    assert "draft-model" in told["drafters"]
    assert (told["device"], told["threads"]) == ("cpu", 1)


def test_parts_passes_and_ops_fit_together(told: dict[str, Any]) -> None:
    for run in told["runs"]:
        assert run["parts"].keys() == PARTS.keys()
        assert all(run["parts"][part] > 0 for part in ("plan", "batch", "forward", "pick", "keep", "tell"))
        assert sum(run["parts"].values()) < run["seconds"], "every part lies within the run"
        assert sum(n for n, _ in run["passes"].values()) == run["n_steps"]
        in_passes = sum(seconds for _, seconds in run["passes"].values())
        assert run["parts"]["forward"] < in_passes < run["seconds"], "a pass is more than its forward"
        assert {"linear", "attention", "choose", "add_rms_norm"} <= run["ops"].keys()
        assert 0 < sum(op["seconds"] for op in run["ops"].values()) < run["ops_steps_s"]
    plain = told["runs"][0]
    assert plain["n_steps"] == plain["ops_steps"], "plainly the same requests take the same steps"
    assert plain["ops"]["linear"]["n_calls"] % plain["ops_steps"] == 0
    drafted = told["runs"][1]["ops"]["linear"]["n_calls"] / told["runs"][1]["ops_steps"]
    assert drafted > plain["ops"]["linear"]["n_calls"] / plain["ops_steps"], (
        "the draft model's are counted too"
    )


def test_the_table_shows_them(told: dict[str, Any]) -> None:
    lines = table(told).splitlines()
    assert lines[0].startswith("target: 5.2 M parameters")
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["steps"] == [str(run["n_steps"]) for run in told["runs"]]
    shares = [[float(cell.rstrip("%")) for cell in rows[part] if cell.endswith("%")] for part in PARTS]
    assert [sum(column) for column in zip(*shares, strict=True)] == pytest.approx([100] * 4, abs=1)
    assert len(rows["attention"]) == 3 * 4
    dearest = max(
        told["runs"][0]["ops"], key=lambda op: sum(run["ops"][op]["seconds"] for run in told["runs"])
    )
    title = next(i for i, line in enumerate(lines) if line.startswith("ops"))
    assert lines[title + 2].split()[0] == dearest


@pytest.mark.usefixtures("told")
def test_the_trace_holds_steps_and_ops_on_one_axis(out: Path) -> None:
    events = [one for one in json.loads(out.read_text())["traceEvents"] if one["ph"] == "X"]
    steps = [one for one in events if one.get("cat") == "step"]
    assert {one["name"] for one in steps} == PARTS.keys()
    for one, after in pairwise(steps):
        assert one["ts"] + one["dur"] <= after["ts"] + 0.01, "parts overlap"
    passes = [
        (one["ts"], one["ts"] + one["dur"]) for one in steps if one["name"] in ("forward", "draft", "learn")
    ]
    linears = [(one["ts"], one["ts"] + one["dur"]) for one in events if one["name"] == "linear"]
    assert len(linears) > len(passes)
    for start, end in linears:
        assert any(first - SLACK_US <= start and end <= last + SLACK_US for first, last in passes)
    assert any(one["name"].startswith("aten::") for one in events)


def test_prompts_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last is played as often as there are tasks for it; one too long is refused by name."""
    file = tmp_path / "prompts.txt"
    file.write_text("def f(x):\n\nreturn " + "x + " * 100)
    flags = ["-m", TARGET, "-t", "1", "-c", "64", "--spec-type", "none", "--prompts", str(file)]
    assert dispatch(["profile", *flags, "--tasks", "1", "--tokens", "3", "--json"], {}) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["kind"], run["n_tokens"]) == ("plain", 3)
    assert dispatch(["profile", *flags, "--tasks", "2"], {}) == 1
    assert "64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tasks", "0"], "0: must be a whole number of at least 1"),
        (["--tokens", "many"], "many: must be a whole number"),
        (["--prompts", "no/such.txt"], "no/such.txt"),
        (["--prompts", "/dev/null"], "holds no prompt"),
        (["--trace", "no/such/folder/trace.json"], "no/such/folder"),
        (["--trace", "tests"], "--trace tests: cannot be written"),
        (["--trace", ""], "--trace .: cannot be written"),
        (["--host", "::1"], "unrecognized arguments: --host"),
    ],
)
def test_bad_usage_is_told(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        dispatch(["profile", "-m", TARGET, *flags], {})
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_a_trace_replaces_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace that cannot be written is removed; `--trace /dev/null` would have lost the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SystemExit) as caught:
        dispatch(["profile", "-m", TARGET, "--tasks", "1", "--tokens", "1", "--trace", str(pipe)], {})
    assert caught.value.code == 2
    assert f"--trace {pipe}: cannot be written" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    flags = ["-m", TARGET, "-md", DRAFT, "--draft-max", "0", "-t", "1", "--tasks", "1", "--tokens", "1"]
    assert dispatch(["profile", *flags], {}) == 0
    assert caplog.text.count("not loaded, as nothing is drafted (--draft-max 0): --model-draft") == 1


FEW = ["profile", "-m", TARGET, "-t", "1", "--tasks", "1", "--tokens", "1", "--spec-type", "none"]


def test_a_full_disk_is_told_and_no_part_of_a_trace_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object, file: IO[str]) -> None:
        file.write("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json, "dump", full)
    path = tmp_path / "trace.json"
    assert dispatch([*FEW, "--trace", str(path)], {}) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"--trace {path}: No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_torch_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises nothing, and leaves a part behind."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def half(_: object, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", half)
    assert dispatch([*FEW, "--trace", str(tmp_path / "trace.json")], {}) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"slipstream profile: --trace {tmp_path / 'temporary'}")
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []


def test_another_fault_is_not_the_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("slipstream.engine.service.tools.profile.launch", unreadable)
    with pytest.raises(OSError, match="Input/output error"):
        dispatch([*FEW, "--trace", str(tmp_path / "trace.json")], {})


def test_a_request_that_fails_ends_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise StepFailed("the pass failed")

    monkeypatch.setattr("slipstream.engine.service.tools.profile._play", fail)
    assert dispatch(FEW, {}) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "slipstream profile: the pass failed"


def test_a_compressed_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    assert dispatch([*FEW, "--trace", str(path)], {}) == 0
    assert any(
        one.get("cat") == "step" for one in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    )


def test_a_model_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["profile", "-m", str(tmp_path)], {}) == 3
    assert str(tmp_path) in capsys.readouterr().err
