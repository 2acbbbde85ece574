"""A command with all the processes that it starts, which end together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CUDA = "/usr/local/cuda/bin"


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command printed and how it ended."""

    output: str
    status: int
    is_late: bool  # it was killed, because its time was up


def tool(name: str) -> str | None:
    """Where a program of the CUDA toolkit is."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), CUDA]))


def run(command: Sequence[str], seconds: float, more: Mapping[str, str] | None = None) -> Ended:
    """Run a command from the repository's root. more: environment variables beside ours.

    What it started is killed with it: a profiler's own child would keep the pipe open, and hold the device.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = False
    try:
        output, _ = process.communicate(timeout=max(0.1, seconds))
    except subprocess.TimeoutExpired:
        late = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if late:
        output, _ = process.communicate()
    return Ended(output, process.returncode, late)
