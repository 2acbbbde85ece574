"""A real server in a process of its own, on the demo pair or over the fake engine, for tests that are clients."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forks import Forked

ROOT = Path(__file__).parents[1]
DEMO = ("-m", str(ROOT / "demo" / "target"), "-md", str(ROOT / "demo" / "draft"), "--alias", "demo")
SERVER, FAKE = "slipstream.server", "tests.http.entry"
READY_S, STOP_S = 120.0, 30.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that takes requests; what it logs goes to a file."""

    process: subprocess.Popen[bytes] | Forked
    url: str
    log: Path

    def surprises(self) -> list[str]:
        """Lines of the log that tell of exceptions nobody expected."""
        text = self.log.read_text(errors="replace")
        return [line for line in text.splitlines() if "Traceback" in line or "unexpected" in line]

    def stop(self) -> int:
        """SIGTERM; the exit status. A server that does not stop is killed and logs where its threads were."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            return self.process.wait(STOP_S)


@contextlib.contextmanager
def running(
    log: Path,
    arguments: Sequence[str] = DEMO,
    program: str | Path = SERVER,
    environ: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    ready_s: float = READY_S,
) -> Iterator[Running]:
    """A server with these arguments on a free port. Raises AssertionError if it does not become ready.

    `program` is the name of a module, or the path of an installed command. It is started in `folder`.
    """
    port = free_port()
    command = [str(program)] if isinstance(program, Path) else [sys.executable, "-m", program]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *arguments, "--port", str(port)],
            cwd=folder,
            env={**_plain(), **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    with _ended(Running(process, f"http://127.0.0.1:{port}", log), ready_s) as one:
        yield one


@contextlib.contextmanager
def forked(
    log: Path,
    arguments: Sequence[str] = DEMO,
    program: str = SERVER,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """As `running`, in a fork, which is ready earlier: for tests whose subject is neither start nor speed."""
    port = free_port()
    process = Forked(program, (*arguments, "--port", str(port)), {**_plain(), **(environ or {})}, ROOT, log)
    with _ended(Running(process, f"http://127.0.0.1:{port}", log), READY_S) as one:
        yield one


def _plain() -> dict[str, str]:
    """The environment without settings of the developer's."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}
    return {**plain, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


@contextlib.contextmanager
def _ended(one: Running, ready_s: float) -> Iterator[Running]:
    """Once it is ready; it does not outlive the block."""
    try:
        wait(one, "/health", ready_s)
        yield one
    finally:
        if one.process.poll() is None:
            one.process.terminate()
            try:
                one.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def wait(one: Running, path: str, ready_s: float) -> None:
    """Until a page of the server is there. Raises AssertionError if that takes longer, or the process has ended."""
    end = time.monotonic() + ready_s
    while time.monotonic() < end:
        assert one.process.poll() is None, one.log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(one.url + path, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"not ready within {ready_s:g} s: {one.log.read_text()[-2000:]}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
