"""Runs the parts in a process of their own, watches their time, and goes on after a crash.

An illegal memory access spoils a CUDA context for good, and a kernel that hangs cannot be interrupted from within. So
the process that does the work is expendable: it writes a line per finding. When it dies, the case it was at has failed;
when its part overruns, what is left of the part was not measured. Another process goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.gpu.parts import Part
from tests.gpu.setting import NOT_MEASURED

POLL_S = 0.05
NO_TIME = f"{NOT_MEASURED}no time left for the whole run"
ROOT = Path(__file__).parents[2]
N_TAIL = 2000  # characters of a dead process's last words

Record = dict[str, Any]


@dataclass(slots=True)
class Progress:
    """What is known of a run, over all its processes."""

    findings: list[Record] = field(default_factory=list)
    done: dict[str, list[str]] = field(default_factory=dict)  # part -> cases that are finished, well or not
    finished: set[str] = field(default_factory=set)  # parts that are
    spent_s: dict[str, float] = field(default_factory=dict)
    at: tuple[str, str] | None = None  # part and case that is running
    part: str | None = None  # that is running
    since: float = 0.0  # when the clock of the part was last read

    def hear(self, line: str) -> None:
        """Take one line of the process in."""
        record = json.loads(line)
        kind, part = record.pop("kind"), record["part"]
        if kind == "begin":
            self.part, self.at = part, (part, record["case"])
            self.done.setdefault(part, [])
        elif kind == "end":
            self.done[part].append(record["case"])
            self.at = None
        elif kind == "finished":
            self.finished.add(part)
            self.part = None
        else:
            self.note(record)

    def note(self, record: Record) -> None:
        """Take a finding in, and print it."""
        self.findings.append(record)
        sys.stdout.write(line_of(record) + "\n")
        sys.stdout.flush()

    def tick(self) -> None:
        """Charge the part that is running with the time since the last tick."""
        now = time.monotonic()
        if self.part is not None:
            self.spent_s[self.part] = self.spent_s.get(self.part, 0.0) + now - self.since
        self.since = now

    def lose(self, why: str, *, ok: bool | None = False) -> None:
        """The process is gone: what it was doing is not tried again. ok: None where time alone was short."""
        part, case = self.at or (self.part or "start", "")
        self.note({"part": part, "case": case, "name": case or part, "ok": ok, "figures": {"why": why}})
        self.done.setdefault(part, []).append(case)
        self.at = self.part = None


class Supervisor:
    """Runs the parts in one process after another until all are finished or the time is up."""

    def __init__(
        self,
        child: Sequence[str],
        parts: Mapping[str, Part],
        total_s: float,
        grace_s: float,
        keep: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """child: a command that takes `--plan` (JSON) and `--lines` (a file). keep: called whenever more is known."""
        self.progress = Progress()
        self._child, self._parts, self._grace_s, self._keep = child, parts, grace_s, keep
        self._deadline = time.monotonic() + total_s

    def run(self) -> Progress:
        progress = self.progress
        with tempfile.TemporaryDirectory() as folder:
            while plan := self._plan():
                if time.monotonic() >= self._deadline:
                    for one in plan:
                        progress.part = one["part"]
                        progress.lose(NO_TIME, ok=None)
                    break
                before = len(progress.findings), len(progress.finished)
                self._one_process(plan, Path(folder) / f"{len(progress.findings)}.jsonl")
                if (len(progress.findings), len(progress.finished)) == before:
                    progress.lose("the process ended without a word")  # and would do so again
                    break
                if progress.done.get("start"):
                    break  # it died before its first part
        return progress

    def _plan(self) -> list[Record]:
        """What is left to do, as the process takes it."""
        progress = self.progress
        return [
            {
                "part": name,
                **asdict(part),
                "seconds": part.seconds - progress.spent_s.get(name, 0.0),
                "until": self._deadline,
                "skip": progress.done.get(name, []),
            }
            for name, part in self._parts.items()
            if name not in progress.finished
        ]

    def _one_process(self, plan: Sequence[Record], lines: Path) -> None:
        progress = self.progress
        lines.touch()
        progress.since = time.monotonic()
        with lines.open() as heard, lines.with_suffix(".log").open("w+", errors="replace") as log:
            command = [*self._child, "--plan", json.dumps(list(plan)), "--lines", str(lines)]
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                killed = self._watch(process, heard)
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if killed:
                if progress.part is not None and killed != NO_TIME:
                    progress.finished.add(progress.part)  # its time is spent
                progress.lose(killed, ok=None)
            elif process.returncode and (progress.at is not None or not progress.done):
                log.seek(0)
                tail = log.read()[-N_TAIL:].strip()
                progress.lose(f"the process ended with {process.returncode}: {tail}")
            progress.at = progress.part = None  # one that leaves between two cases has said why

    def _watch(self, process: subprocess.Popen[bytes], heard: TextIO) -> str:
        """Listen until the process ends (empty) or must be killed (why)."""
        rest, killed = "", ""
        while True:
            ended = process.poll() is not None
            *whole, rest = (rest + heard.read()).split("\n")
            for line in whole:
                self.progress.hear(line)
            self.progress.tick()
            if whole:
                self._keep(self.progress)
            if ended or killed:
                return killed
            killed = self._overrun()
            if not killed:
                time.sleep(POLL_S)

    def _overrun(self) -> str:
        """Why the process must go; empty if it may stay."""
        if time.monotonic() > self._deadline + self._grace_s:
            return NO_TIME
        part = self.progress.part
        spent = self.progress.spent_s.get(part or "", 0.0)
        if part is None or spent <= self._parts[part].seconds + self._grace_s:
            return ""
        return f"{NOT_MEASURED}killed after {spent:.0f} s, {self._parts[part].seconds:g} s were allowed"


def line_of(record: Record) -> str:
    """A finding as it is printed."""
    mark = {True: "ok  ", False: "FAIL", None: "    "}[record["ok"]]
    figures = "  ".join(f"{name} {_short(value)}" for name, value in record["figures"].items())
    return f"{mark} {record['part']:9} {record['name']:44} {figures}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
