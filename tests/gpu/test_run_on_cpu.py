"""`make gpu` as far as a machine without a GPU can run it: its whole flow, at tiny sizes, on a bare machine."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import kernels
from slipstream.engine.api import Chat
from slipstream.engine.text.chat import load_chat_template
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.kernels.dispatch import CannotRunError
from tests.gpu import counters, group, kernel_times, run, sanitizer
from tests.gpu.group import Ended
from tests.gpu.parts import PARTS, TOTAL_S, Part
from tests.gpu.report import Report, unmeasured
from tests.gpu.setting import NOT_MEASURED, Setting
from tests.gpu.supervise import NO_TIME, Progress, Supervisor
from tests.oracle.lossless import demo_prompt
from tests.process import ROOT

QUICK = ("--device", "cpu", "--quick", "--out")


def report_of(folder: Path) -> dict[str, Any]:
    """What the JSON says; there is one page of tables beside it, and nothing else."""
    page, data = sorted(folder.iterdir(), key=lambda one: one.suffix == ".json")
    assert page.suffix == ".md"
    assert page.stem == data.stem
    found: dict[str, Any] = json.loads(data.read_text())
    assert data.stem.startswith(f"cpu-x86-64-{found['when'][:10]}") or not data.stem.startswith("cpu-x86")
    for name in found["failed"]:
        assert f"FAILED {name}" in page.read_text()
    return found


def test_all_modules_load_on_a_bare_machine() -> None:
    subprocess.run([sys.executable, "-c", "from tests.gpu import bare; bare.load()"], check=True, cwd=ROOT)


@pytest.mark.sampled(keep=0)
def test_every_part_runs_on_a_bare_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*QUICK, str(tmp_path)], child=("-m", "tests.gpu.bare")) == 0, capsys.readouterr().out
    found = report_of(tmp_path)
    assert not found["failed"]
    assert {one["part"] for one in found["findings"]} == set(PARTS)
    by_part = {
        part: [one for one in found["findings"] if one["part"] == part and one["ok"] is not None]
        for part in PARTS
    }
    drawn = {one["name"].split(".")[0] for one in by_part["parity"]}
    assert drawn == set(kernels.OPS)  # the references, and what of the rest needs no compiler
    assert any("matmul.tiled" in one["name"] for one in by_part["width"])
    for part in ("replays", "lossless", "drafts", "chains"):
        counted = [one["figures"]["tokens"] for one in by_part[part] if "tokens" in one["figures"]]
        assert counted, part
        assert min(counted) > 0, part
    assert any("replays of every size" in one["name"] for one in by_part["replays"])
    speeds = [
        one for one in found["findings"] if one["part"] in ("speed", "ceilings") and "us" in one["figures"]
    ]
    assert len(speeds) > 20
    assert sum(found["seconds_by_part"].values()) <= found["seconds"]


# Breaks one kernel, one part and, with a signal, the process itself; then does what the process would do.
BROKEN = """
import os, signal, sys
from tests.gpu import bare, child
bare.block()
import tests.gpu.ceilings, tests.gpu.machine, tests.gpu.parity, tests.gpu.width
from slipstream.kernels.matmul import tiled

right = tiled.linear
def wrong(x, packed, out_dtype=None):
    y = right(x, packed, out_dtype).clone()
    y[-1, -1] += 0.01 if len(y) > 1 else 0.001
    return y
tiled.linear = wrong

def raises(setting, case):
    raise RuntimeError("a part that raises")
tests.gpu.ceilings.run = raises

as_it_was = tests.gpu.machine.run
def dies(setting, case):
    if case == "device":
        os.kill(os.getpid(), signal.SIGSEGV)
    return as_it_was(setting, case)
tests.gpu.machine.run = dies
tests.gpu.parity.cases = tests.gpu.width.cases = lambda setting: ["matmul float32", "norm float32"]
child.main()
"""


@pytest.mark.sampled(keep=0, together=True)
def test_what_fails_is_named_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["--only", "machine", "chosen", "ceilings", "parity-wide", "width-wide"]
    assert run.main([*QUICK, str(tmp_path), *parts], child=("-c", BROKEN)) == 1
    said = capsys.readouterr().out
    found = report_of(tmp_path)
    (data,) = tmp_path.glob("*.json")
    assert data.stem.endswith("-".join(parts[1:]))  # it is not taken for a whole run
    assert found["failed"] == [
        "machine: device",
        "ceilings: copy",
        "ceilings: read",
        "ceilings: matmul",
        "parity-wide: matmul.tiled float32",
        "width-wide: matmul.tiled float32",
    ]
    assert "FAILED parity-wide: matmul.tiled float32: off by " in said
    assert "FAILED ceilings: copy: RuntimeError: a part that raises" in said
    assert "the process ended with -11" in said
    named = {one["name"]: one["ok"] for one in found["findings"]}
    assert named["torch"] is None  # of the part whose process died, the cases before
    assert named["matmul float32"] is None  # and behind it
    assert named["norm.reference float32"] is True
    assert named["matmul.cpu float32"] is True


def supervised(
    code: str,
    seconds: dict[str, float],
    total_s: float = 20.0,
    grace_s: float = 0.2,
    keep: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """A run of parts whose process is this code, which finds `plan`, and `say` to write a line."""
    head = (
        "import json, os, sys, time\n"
        "plan = json.loads(sys.argv[sys.argv.index('--plan') + 1])\n"
        "file = open(sys.argv[sys.argv.index('--lines') + 1], 'a')\n"
        "def say(kind, part, **more):\n"
        "    file.write(json.dumps({'kind': kind, 'part': part, **more}) + '\\n')\n"
        "    file.flush()\n"
    )
    parts = {name: Part(name, one) for name, one in seconds.items()}
    return Supervisor([sys.executable, "-c", head + code], parts, total_s, grace_s, keep).run()


EACH = """
for one in plan:
    part = one['part']
    for case in ('first', 'second'):
        if case in one['skip']:
            continue
        say('begin', part, case=case)
        WORK
        say('finding', part, case=case, name=f'{part} {case}', ok=True, figures={})
        say('end', part, case=case)
    say('finished', part)
"""


def names(progress: Progress) -> dict[str, bool | None]:
    return {f"{one['part']} {one['case']}": one["ok"] for one in progress.findings}


def test_a_part_that_hangs_is_killed_and_counts_as_not_measured_and_the_next_one_runs() -> None:
    code = EACH.replace("WORK", "if (part, case) == ('a', 'second'): time.sleep(60)")
    progress = supervised(code, {"a": 0.4, "b": 5.0})
    assert names(progress) == {"a first": True, "a second": None, "b first": True, "b second": True}
    (missing,) = unmeasured(progress)
    assert "killed after" in missing["figures"]["why"]


def test_a_process_that_leaves_after_a_cuda_error_is_followed_by_another() -> None:
    work = "if (part, case) == ('a', 'first'): say('end', part, case=case); sys.exit(3)"
    code = EACH.replace("WORK", f"say('finding', part, case=case, name='x', ok=False, figures={{}}); {work}")
    progress = supervised(code.replace("; if", "\n        if"), {"a": 5.0, "b": 5.0})
    assert [(one["part"], one["case"], one["ok"]) for one in progress.findings] == [
        ("a", "first", False),
        ("a", "second", False),
        ("a", "second", True),
        ("b", "first", False),
        ("b", "first", True),
        ("b", "second", False),
        ("b", "second", True),
    ]


def test_when_time_is_up_the_rest_is_said_to_be_missing() -> None:
    code = EACH.replace("WORK", "if part == 'b': time.sleep(60)")
    progress = supervised(code, {"a": 5.0, "b": 5.0, "c": 5.0}, total_s=0.5)
    assert names(progress) == {"a first": True, "a second": True, "b first": None, "b ": None, "c ": None}
    assert {one["figures"]["why"] for one in progress.findings[2:]} == {NO_TIME}


@pytest.mark.parametrize("code", ["sys.exit('cannot start')", "pass"])
def test_a_process_that_never_begins_is_a_failure(code: str) -> None:
    progress = supervised(code, {"a": 5.0})
    assert [one["ok"] for one in progress.findings] == [False]


def test_what_is_wanted_first_fits_into_the_time_of_a_run() -> None:
    names = list(PARTS)
    wanted = names[: names.index("lossless")]
    assert {"selfcheck", "plain", "parity", "prompts", "counters"} < set(wanted)
    assert sum(PARTS[name].seconds for name in wanted) <= TOTAL_S <= 9 * 60
    for part in PARTS.values():  # each pattern picks something
        module = importlib.import_module(f"tests.gpu.{part.module}")
        cases = module.cases(Setting(torch.device("cpu"), quick=True, deadline=0.0))
        assert any(re.match(part.cases, case) for case in cases), part


def test_every_case_belongs_to_one_part() -> None:
    setting = Setting(torch.device("cpu"), quick=False, deadline=0.0)
    for module in {part.module for part in PARTS.values()}:
        patterns = [part.cases for part in PARTS.values() if part.module == module]
        for case in importlib.import_module(f"tests.gpu.{module}").cases(setting):
            assert sum(bool(re.match(one, case)) for one in patterns) == 1, f"{module}: {case}"


def test_results_are_written_as_they_come(tmp_path: Path) -> None:
    """So a run that is killed from outside leaves what it has found."""
    report, seen = Report(tmp_path), []

    def keep(progress: Progress) -> None:
        for file in report.write(progress)[:1]:
            seen.append([one["name"] for one in json.loads(file.read_text())["findings"]])  # noqa: PERF401

    # All but the first case wait for the file, so the first version of it holds that one alone.
    waits = f"while (part, case) != ('a', 'first') and not os.listdir({str(tmp_path)!r}): time.sleep(0.01)"
    lines = EACH.replace("name=f'{part} {case}'", "name='device'").replace("WORK", waits)
    supervised(lines.replace("figures={}", "figures={'is': 'a GPU'}"), {"a": 5.0, "b": 5.0}, keep=keep)
    assert seen[0] == ["device"]
    assert len(seen[-1]) == 4
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_command_is_killed_with_what_it_started() -> None:
    """A process that is left behind would keep the pipe open, and this test waiting."""
    for seconds in (0.2, 30.0):  # the second where a shell does not start within the first
        ended = group.run(["bash", "-c", "sleep 1000 & echo started; wait"], seconds)
        assert ended.is_late
        if ended.output:
            break
    assert ended.output == "started\n"
    left = group.run(["bash", "-c", "sleep 1000 & exit 3"], seconds=0.2)
    assert left.is_late
    assert not group.run(["true"], seconds=60.0).is_late


def test_kernels_are_summed_by_name_and_the_gaps_between_them_are_told() -> None:
    ran = [
        kernel_times.Ran("void small_rows<64>(float*)", 0.0, 40.0),
        kernel_times.Ran("void small_rows<64>(float*)", 20.0, 50.0),
        kernel_times.Ran("attend(int)", 70.0, 100.0),
    ]
    whole, first, second = kernel_times.table(ran, n_steps=2)
    assert whole.figures == {
        "a step": 1.5,
        "us a step": 40.0,
        "share": 1.0,
        "of the time none runs": pytest.approx(0.2),
    }
    assert (first.name, first.figures["us each"], second.name) == ("small_rows<64>", 35.0, "attend")
    names = {
        "void at::native::(anonymous namespace)::softmax<float, 4>(float*, int)": "softmax<float, 4>",
        "void linear<bfloat16, (int)4, (bool)1>(int)": "linear<bfloat16, 4, 1>",
        "_gate_up": "_gate_up",
    }
    assert {name: kernel_times.short(name) for name in names} == names
    (none,) = kernel_times.table([], n_steps=2)
    assert none.ok is None


def test_counters_are_read_from_the_table_behind_the_messages() -> None:
    names = ("Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
    rows = [
        ("void linear(int)", counters.SHARE, "%", "81.5"),
        ("void linear(int)", counters.TIME, "us", "40.1"),
        ("void linear(int)", counters.SHARE, "%", "90.5"),
        ("void linear(int)", counters.TIME, "us", "36.1"),
    ]
    table = "\n".join(",".join(f'"{cell}"' for cell in row) for row in (names, *rows))
    (found,) = counters.findings(f"==PROF== Connected\n{table}\n")
    assert (found.name, found.figures) == ("linear", {"of peak": "90.5 %", "took": "36.1 us", "runs": 2})
    (missing,) = counters.findings("==ERROR== nothing\n")
    assert missing.figures["why"].startswith(NOT_MEASURED)


def test_the_sanitizer_names_the_kernel() -> None:
    fault = "========= Invalid __global__ write of size 4 bytes\n"
    output = f"\ncase norm.triton\n\ncase choose.cuda\n{fault}\ncase matmul.cuda\n"
    found = {one.name: one.ok for one in sanitizer.findings("memcheck", Ended(output, 9, is_late=False))}
    marks = {"norm.triton, memcheck": True, "choose.cuda, memcheck": False, "matmul.cuda, memcheck": True}
    assert found == {**marks, "memcheck": False}
    summed = "\ncase norm.triton\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    (clean,) = sanitizer.findings("racecheck", Ended(summed, 0, is_late=False))
    assert clean.ok
    *_, before = sanitizer.findings("memcheck", Ended(f"{fault}{summed}", 9, is_late=False))
    assert (before.name, before.figures["why"]) == ("memcheck", fault)
    late = {one.name: one.ok for one in sanitizer.findings("memcheck", Ended(output, -9, is_late=True))}
    assert late == {**marks, "matmul.cuda, memcheck": None}
    (none,) = sanitizer.findings("racecheck", Ended("", -9, is_late=True))
    assert (none.name, none.ok) == ("racecheck", None)


def test_a_kernel_that_cannot_be_prepared_is_named_and_the_reference_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.kernels.gated import cpu as gated

    def cannot(device: torch.device, dtype: torch.dtype) -> None:
        raise CannotRunError("kernels/gated/gated.cu: does not compile")

    monkeypatch.setattr(gated, "prepare", cannot, raising=False)
    table = {one.op: one for one in kernels.select("cpu", torch.float32)}
    assert table["gated"].implementation == "reference"
    assert table["gated"].failed == ("cpu: kernels/gated/gated.cu: does not compile",)
    monkeypatch.delattr(gated, "prepare")
    assert not any(one.failed for one in kernels.select("cpu", torch.float32))


def test_demo_prompts_are_what_the_template_makes() -> None:
    folder = run.ROOT / "demo"
    tokenizer = Tokenizer(folder / "target")
    template = load_chat_template(folder / "target", tokenizer)
    assert template is not None
    for line in (folder / "tasks.jsonl").read_text().splitlines()[::9]:
        messages = json.loads(line)["messages"]
        assert list(demo_prompt(tokenizer, messages)) == template.encode(Chat(messages))
