"""What a user sees on a terminal: a start, a typo, a missing folder, a model that does not fit, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.forks import Forked
from tests.process import DEMO, ROOT

ABOUT = ("server/command/*.py",)
WITHIN_S = 120.0


class Terminal:
    """A command on a terminal of its own, and what it has written so far."""

    def __init__(self, *arguments: str) -> None:
        self._reader, writer = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.server", *arguments],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")},
            stdin=writer,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
        )
        os.close(writer)
        self._written = bytearray()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        # A terminal that is open nowhere else reads as an error.
        with contextlib.suppress(OSError):
            while piece := os.read(self._reader, 4096):
                self._written += piece

    @property
    def text(self) -> str:
        """The lines without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self._written.decode(errors="replace")).replace("\r\n", "\n")

    def until(self, word: str) -> str:
        """The text once the word is in it."""
        end = time.monotonic() + WITHIN_S
        while word not in self.text:
            assert time.monotonic() < end, self.text
            assert self._thread.is_alive(), self.text  # it reads until the last process has left the terminal
            time.sleep(0.02)
        return self.text

    def type(self, text: str) -> None:
        os.write(self._reader, text.encode())

    def ends(self) -> int:
        status = self.process.wait(WITHIN_S)
        self._thread.join(5)
        return status

    def is_left(self) -> None:
        """By all processes, those too that the command has started."""
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive(), self.text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._thread.join(5)
        os.close(self._reader)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    one = Terminal(*arguments)
    try:
        yield one
    finally:
        one.close()


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_a_start_and_ctrl_c() -> None:
    with terminal(*DEMO, "--port", "0") as one:
        text = one.until("to stop")
        url = re.search(r"demo is ready on (http://127\.0\.0\.1:\d+)\n", text)
        assert url is not None
        assert f"  chat page    {url[1]}/\n" in text
        assert f"  API          {url[1]}/v1\n" in text
        assert (
            "  speculation  forced, prediction, suffix, draft-model; up to 16 tokens a step, as long as they pay\n"
            in text
        )
        phases = ("listening", "weights loaded seconds=", "warm seconds=", "loaded model=demo")
        places = [text.index(phase) for phase in phases]
        assert places == sorted(places)
        assert text.index(phases[-1]) < url.start()
        one.process.send_signal(signal.SIGINT)
        assert one.ends() == 0
        assert "draining" in one.text
        assert "Traceback" not in one.text


@pytest.mark.sampled
def test_ctrl_c_twice_ends_at_once() -> None:
    with terminal(*DEMO, "--port", "0", "--shutdown-timeout", "100") as one:
        found = re.search(r"http://127\.0\.0\.1:\d+", one.until("to stop"))
        assert found is not None
        body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{found[0]}/v1/completions", json=body, timeout=60) as reply:
            next(reply.iter_lines())
            one.process.send_signal(signal.SIGINT)
            one.until("draining")
            one.process.send_signal(signal.SIGINT)
            assert one.ends() == 128 + signal.SIGINT
        assert "Traceback" not in one.text


# Ctrl-C while the first of the larger libraries is imported.
PRESSED = """
import signal, sys
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "uvicorn":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Pressed())
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started these tests may have it ignored
from slipstream.server.__main__ import main
main()
"""


def test_ctrl_c_while_modules_are_imported() -> None:
    ended = subprocess.run([sys.executable, "-c", PRESSED], capture_output=True, check=False, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, b"", b"")


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize(
    ("arguments", "status", "last"),
    [
        (
            ["-m", "demo/target", "--draft-mxa", "4"],
            2,
            "slipstream serve: error: unrecognized arguments: --draft-mxa; did you mean --draft-max?",
        ),
        (["sevre", "-m", "demo/target"], 2, "slipstream: sevre: no such subcommand; did you mean serve?"),
        (["-m", "./demo/tarket"], 3, "./demo/tarket: no such folder; did you mean demo/target?"),
        (["-m", "tests/none.gguf/x/y"], 3, "tests/none.gguf/x/y: no such folder"),
    ],
)
def test_mistakes_end_in_a_line_that_helps(arguments: list[str], status: int, last: str) -> None:
    with terminal(*arguments) as one:
        assert one.ends() == status
        assert last in lines(one.text)[-1]
        assert len(lines(one.text)) <= 2


def why_it_does_not_load(log: Path, *arguments: str) -> str:
    """The one line that says so. The last word on a terminal is that of `test_mistakes_end_in_a_line_that_helps`."""
    process = Forked("slipstream.server", (*arguments, "--port", "0"), os.environ, ROOT, log)
    assert process.wait(WITHIN_S) == 3
    assert "Traceback" not in log.read_text()
    (line,) = [line for line in lines(log.read_text()) if "cannot_load" in line]
    return line


def test_a_model_that_does_not_fit_says_what_would(tmp_path: Path) -> None:
    line = why_it_does_not_load(tmp_path / "log", *DEMO, "--cache-size", "1", "--ctx-size", "2048")
    assert "--ctx-size" in line
    assert "would fit" in line


def test_a_gguf_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    assert str(path) in why_it_does_not_load(tmp_path / "log", "-m", str(path))


OWN_SERVER = ("chat", "-m", "demo/target", "--no-exact")


@pytest.mark.sampled(together=True)
def test_a_conversation_brings_its_own_server() -> None:
    """`slipstream chat -m` starts a server, talks to it and ends it."""
    command = [
        sys.executable,
        "-m",
        "slipstream.server",
        "chat",
        "-m",
        str(ROOT / "demo" / "target"),
        "--max-tokens",
        "8",
    ]
    found = subprocess.run(
        [*command, "--temp", "0", "--api-key", "k", "--api-prefix", "/llm"],
        input="Continue this code:\\\ndef add(a, b):\n",
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")
    # Whether anything was drafted, which the line may go on to say, depends on the machine.
    assert re.search(r"^\d+ tokens · [\d.]+ tokens/s", found.stdout, re.MULTILINE)
    assert "return" in found.stdout
    missing = subprocess.run([*command[:4], "-m", "./no/such"], input="", capture_output=True, text=True)
    assert missing.returncode == 1
    assert "./no/such: no such folder" in missing.stderr
    assert "the server could not load the model (exit status 3)" in missing.stderr


@pytest.mark.sampled(together=True)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a killed process cannot end another")
def test_a_chat_that_is_killed_leaves_no_server() -> None:
    with terminal(*OWN_SERVER) as one:
        one.until("/new starts over")
        one.process.kill()
        one.is_left()


@pytest.mark.sampled(together=True)
@pytest.mark.skipif(sys.platform != "linux", reason="the server is found under /proc")
def test_a_chat_whose_own_server_is_gone_ends() -> None:
    with terminal(*OWN_SERVER) as one:
        one.until("\n> ")
        chat = one.process.pid
        server = int(Path(f"/proc/{chat}/task/{chat}/children").read_text())
        os.kill(server, signal.SIGKILL)
        while Path(f"/proc/{server}/cmdline").read_bytes():  # it is empty once the process has ended
            time.sleep(0.02)
        one.type("hello\n")
        assert one.ends() == 1
        assert "slipstream chat: the connection ended" in one.text
