"""A server process from start to exit: signals, draining, exit statuses. Real processes, a fake engine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.engine.settings import Settings
from slipstream.server.command.serve import run
from slipstream.server.http.address import bind
from tests.forks import Forked
from tests.http.entry import load
from tests.http.serving import PATIENCE_S, chat, logged, served, until
from tests.process import ROOT, free_port

ENTRY = [sys.executable, "-m", "tests.http.entry"]


def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}


class Process:
    """A server in its own process; what it writes goes to a file. A fork, unless it is started by other commands."""

    def __init__(self, log: Path, *arguments: str, before: Sequence[str] = ()) -> None:
        """before: a command that starts the server's."""
        self._path = log
        self.popen: subprocess.Popen[bytes] | Forked
        if before:
            with log.open("wb") as file:
                command = [*before, *ENTRY, *arguments]
                self.popen = subprocess.Popen(command, stdout=file, stderr=file, env=environ())
        else:
            self.popen = Forked(ENTRY[-1], arguments, environ(), ROOT, log)

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._path.read_text() if self._path.exists() else ""

    def url(self) -> str:
        """The address, once the port is open."""
        until(lambda: '"url":' in self.log or self.popen.poll() is not None)
        found = re.search(r'"url":"(.+?)"', self.log)
        assert found, self.log
        return found[1]

    def ready(self) -> str:
        until(lambda: "is ready on" in self.log or self.popen.poll() is not None)
        return self.url()

    def exits(self) -> int:
        return self.popen.wait(PATIENCE_S)


Start = Callable[..., AbstractContextManager[Process]]


@pytest.fixture
def process(tmp_path: Path) -> Start:
    @contextlib.contextmanager
    def started(*arguments: str, before: Sequence[str] = ()) -> Iterator[Process]:
        one = Process(tmp_path / "log", "--port", "0", *arguments, before=before)
        try:
            yield one
        finally:
            one.popen.kill()
            one.exits()

    return started


def in_background(work: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def cut_off(url: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{url}/v1/chat/completions", json=chat())


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_drains(name: str, process: Start) -> None:
    with process("-m", "fake") as server:
        url = server.ready()
        assert "curl http://127.0.0.1:" in server.log
        stream, streamed = in_background(
            lambda: httpx.post(f"{url}/v1/chat/completions", json=chat(stream=True))
        )
        whole, answered = in_background(lambda: httpx.post(f"{url}/v1/chat/completions", json=chat()))
        until(lambda: sum(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()) == 2)
        server.popen.send_signal(getattr(signal, name))
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert httpx.get(f"{url}/health").json()["status"] == "draining"
        refused = httpx.post(f"{url}/v1/chat/completions", json=chat())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        stream.join(5)
        whole.join(5)
        assert streamed[0].text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"stop"' in streamed[0].text
        assert answered[0].json()["choices"][0]["message"]["content"].endswith("w9 ")
        assert server.exits() == 0
        assert '"event":"drained"' in server.log
        assert "Traceback" not in server.log


def test_the_drain_ends_in_time(process: Start) -> None:
    with process("-m", "fake", "--shutdown-timeout", "0.3") as server:
        url = server.ready()
        stream, streamed = in_background(
            lambda: httpx.post(f"{url}/v1/chat/completions", json=chat(stream=True))
        )
        whole, answered = in_background(lambda: httpx.post(f"{url}/v1/chat/completions", json=chat()))
        until(lambda: sum(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()) == 2)
        server.popen.send_signal(signal.SIGINT)
        stream.join(5)
        whole.join(5)
        *_, error, last, end = streamed[0].text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "server_stopping"
        assert (last, end) == ("data: [DONE]", "")
        assert answered[0].status_code == 503
        assert server.exits() == 0
        assert "Traceback" not in server.log


def test_the_last_response_is_kept(process: Start, tmp_path: Path) -> None:
    """On a slow disk, too: here another process has the file for a moment."""
    place = tmp_path / "responses.db"
    with process("-m", "FAST", "--responses-store", str(place)) as server:
        url = server.ready()
        with contextlib.closing(sqlite3.connect(place)) as other:
            other.execute("begin exclusive")
            made = httpx.post(f"{url}/v1/responses", json={"input": "one"}).json()["id"]
            server.popen.send_signal(signal.SIGTERM)
            until(lambda: '"event":"drained"' in server.log)
            time.sleep(0.3)
            other.rollback()
            assert server.exits() == 0
            assert other.execute("select id from responses").fetchall() == [(made,)]


def test_the_second_signal_means_now(process: Start) -> None:
    with process("-m", "fake") as server:
        url = server.ready()
        request, _ = in_background(lambda: cut_off(url))
        until(lambda: any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()))
        server.popen.send_signal(signal.SIGINT)
        until(lambda: '"event":"draining"' in server.log)
        server.popen.send_signal(signal.SIGINT)
        assert server.exits() == 130
        request.join(5)


def test_a_second_hangup_means_nothing(process: Start) -> None:
    """A terminal that is closed sends one, and so does its shell. SIGTERM then is a second signal."""
    with process("-m", "fake") as server:
        url = server.ready()
        request, _ = in_background(lambda: cut_off(url))
        until(lambda: any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()))
        for _ in range(3):
            server.popen.send_signal(signal.SIGHUP)
            until(lambda: '"event":"draining"' in server.log)
            assert httpx.get(f"{url}/health").json()["status"] == "draining"
        server.popen.send_signal(signal.SIGTERM)
        assert server.exits() == 143
        request.join(5)


def test_a_hangup_that_nohup_ignores_stays_ignored(process: Start) -> None:
    with process("-m", "FAST", before=["nohup"]) as server:
        url = server.ready()
        server.popen.send_signal(signal.SIGHUP)
        assert httpx.post(f"{url}/v1/chat/completions", json=chat()).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        server.popen.send_signal(signal.SIGTERM)
        assert server.exits() == 0


def test_a_terminal_that_is_closed() -> None:
    """The hangup drains, and lines that have nowhere to go do not matter."""
    terminal, its = pty.openpty()
    port = free_port()
    popen = subprocess.Popen(
        [*ENTRY, "-m", "fake", "--port", str(port), "--log-level", "debug"],
        stdin=its,
        stdout=its,
        stderr=its,
        env=environ(),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(its)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: b"is ready on" in os.read(terminal, 1 << 16))
        request, answered = in_background(lambda: httpx.post(f"{url}/v1/chat/completions", json=chat()))
        until(lambda: any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()))
        os.close(terminal)
        request.join(5)
        assert answered[0].status_code == 200
        assert popen.wait(10) == 0
    finally:
        popen.kill()
        popen.wait()


# Standard input, output and error of the server, as a shell writes them.
@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-", "| true", "2>&1 | true"])
def test_standard_streams_that_are_closed(streams: str, tmp_path: Path) -> None:
    """From the start or later: the server serves, no socket gets their numbers, and its status is its own."""
    port = free_port()
    number, status = tmp_path / "number", tmp_path / "status"
    server = [*ENTRY, "-m", "FAST", "--port", str(port), "--log-level", "debug"]
    inner = f"echo $$ > {number}; exec {shlex.join(server)}"
    shell = f"(sh -c {shlex.quote(inner)}; echo $? > {status}) {streams}"
    null = subprocess.DEVNULL
    popen = subprocess.Popen(["sh", "-c", shell], env=environ(), stdin=null, stdout=null, stderr=null)
    try:
        until(lambda: is_up(port) or status.exists())
        for _ in range(3):
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=chat())
            assert answer.status_code == 200
        opened = [os.readlink(f"/proc/{int(number.read_text())}/fd/{one}") for one in range(3)]
        assert all(one.startswith(("/dev/", "pipe:")) for one in opened)
    finally:
        if not status.exists():
            os.kill(int(number.read_text()), signal.SIGTERM)
        popen.wait(10)
    assert status.read_text() == "0\n"


def is_up(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False


def test_other_commands_with_a_closed_output() -> None:
    command = shlex.join(
        [sys.executable, "-m", "slipstream.server", "healthcheck", "--url", "http://127.0.0.1:1"]
    )
    done = subprocess.run(
        ["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, env=environ(), check=False, timeout=30
    )
    assert (done.returncode, done.stderr) == (1, b"")


def test_the_port_is_open_while_loading(process: Start) -> None:
    with process("-m", "SLOW_LOAD") as server:
        url = server.url()
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert httpx.get(url).status_code == 200
        server.popen.send_signal(signal.SIGTERM)
        assert server.exits() == 0


def test_bad_usage(process: Start) -> None:
    with process("-m", "fake", "-ngx", "5") as server:
        assert server.exits() == 2
        assert "slipstream serve: error: unrecognized arguments: -ngx" in server.log


def test_a_model_that_does_not_load(process: Start) -> None:
    with process("-m", "BROKEN") as server:
        assert server.exits() == 3
        assert "BROKEN: no such architecture" in server.log
        assert "Traceback" not in server.log


# What needs no signals runs in this process.


def test_an_unexpected_error_while_loading(caplog: pytest.LogCaptureFixture) -> None:
    assert run(Settings(model="CRASH", port=0), load) == 1
    assert "ZeroDivisionError" in caplog.text


def test_an_engine_that_dies_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    assert run(Settings(model="DYING", port=0), load) == 1
    assert logged(caplog, "engine_failed")


def test_a_taken_port(caplog: pytest.LogCaptureFixture) -> None:
    with bind(Settings(model="x", port=0)) as taken:
        number = taken.getsockname()[1]
        assert run(Settings(model="x", port=number), load) == 4
    assert f"--port {number}: Address already in use" in caplog.text


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host", "foo..bar", "a" * 64 + ".example"])
def test_a_host_that_is_not_ours(host: str, caplog: pytest.LogCaptureFixture) -> None:
    assert run(Settings(model="x", port=0, host=host), load) == 3
    (told,) = logged(caplog, "cannot_start")
    assert told["reason"].startswith(f"--host {host}: ")


def test_a_host_of_a_family_that_the_system_lacks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_none = (-2, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [of_none])
    assert run(Settings(model="x", port=0, host="::1"), load) == 3
    (told,) = logged(caplog, "cannot_start")
    assert told["reason"].startswith("--host ::1: ")


def test_a_folder_of_images_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    assert run(Settings(model="x", port=0, media_path="/no/such"), load) == 3
    assert logged(caplog, "cannot_start")[0]["reason"].startswith("--media-path /no/such: ")


def test_a_store_of_responses_that_cannot_be_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("no database at all, but a text that is longer than the head of one\n" * 9)
    with bind(Settings(model="x", port=0)) as taken:  # opening it would end with status 4
        number = taken.getsockname()[1]
        for place, reason in (
            (tmp_path / "no" / "where.db", "No such file or directory"),
            (tmp_path, "Is a directory"),
            ("", "No such file or directory"),
            (other, "file is not a database"),
        ):
            caplog.clear()
            assert run(Settings(model="x", port=number, responses_store=str(place)), load) == 3
            (told,) = logged(caplog, "cannot_start")
            shown = str(place) or "''"
            assert told["reason"] == f"--responses-store {shown}: {reason}"


def test_open_to_all_without_a_key_warns(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run(Settings(model="DYING", port=0, host="0.0.0.0"), load)
    # Not of this machine's loopback alone.
    assert re.search(r"ANYONE WHO CAN REACH PORT \d+ OF 0\.0\.0\.0 MAY", caplog.text)
    caplog.clear()
    run(Settings(model="DYING", port=0, host="0.0.0.0", api_key="k"), load)
    assert "ANYONE" not in caplog.text
    assert "'authorization: Bearer YOUR_KEY'" in capsys.readouterr().out


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with served(host="::1") as server:
        assert server.http.get("/health").json() == {"status": "ok"}
