"""Modules run as programs in forks of a process that has loaded what servers load.

Loading torch and the server costs three seconds of processor time, and tests start dozens of servers. Tests about
starting (tests/service/test_terminal.py), longer runs and benchmarks start theirs as users do.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path


class Forked:
    """A process with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        """What it writes is appended to `log`; it reads an empty input."""
        self._process: BaseProcess = _context().Process(
            target=_run, args=(module, tuple(arguments), dict(environ), folder, log)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, below 0 for a signal. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.loaded"])
    return context


def _run(module: str, arguments: tuple[str, ...], environ: dict[str, str], folder: Path, log: Path) -> None:
    """In the fork: `python -m module` with these arguments."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    faulthandler.enable(2)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
