"""The log: one line per event whatever a client sends, counts and never text, in both forms."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.api import Failed
from slipstream.engine.errors import StepFailed
from slipstream.server.command import cli
from slipstream.server.report import logs, pulse
from tests.http.fake import FakeEngine, counted, delta, done
from tests.http.serving import Served, chat, logged, raw, served, until

HOSTILE = 'a\nb\r{"event":"forged"}\x1b[31m\x9b1m\u2028\u202e'


@pytest.fixture
def server() -> Iterator[Served]:
    """One per test: a request is logged and counted a moment after its reply."""
    with served() as one:
        yield one


@pytest.fixture
def written(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """What all loggers write in the form of the test's parameter `form`."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.formatter(request.getfixturevalue("form")))
    root, level = logging.getLogger(), logging.getLogger("slipstream").level
    root.addHandler(handler)
    logging.getLogger("slipstream").setLevel("DEBUG")
    yield stream
    root.removeHandler(handler)
    logging.getLogger("slipstream").setLevel(level)


@pytest.mark.parametrize("form", ["json", "text"])
def test_nothing_forges_a_line(written: io.StringIO, form: str) -> None:
    log = logs.logger("slipstream.server.test")
    log.info(HOSTILE, user=HOSTILE, names=[HOSTILE], nothing=None, seconds=0.12345678)
    logging.getLogger("slipstream.engine.test").warning("dropped request=%s", HOSTILE)
    lines = written.getvalue().split("\n")[:-1]
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert "nothing" not in lines[0]
    assert "0.123457" in lines[0]
    if form == "json":
        first, second = map(json.loads, lines)
        assert (first["level"], first["logger"]) == ("info", "slipstream.server.test")
        assert (second["level"], second["logger"]) == ("warning", "slipstream.engine.test")
        assert "forged" in first["user"]


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_traceback_cannot_pass_for_an_event(written: io.StringIO, form: str) -> None:
    secret = "what the user wrote"
    for log in (logs.logger("slipstream.server.test"), logging.getLogger("slipstream.engine.test")):
        try:
            raise ValueError(HOSTILE, len(secret))
        except ValueError:
            log.exception("failed")
    text = written.getvalue()
    assert secret not in text, "local variables hold prompts"
    assert "ValueError" in text
    if form == "json":
        assert [json.loads(line)["event"] for line in text.splitlines()] == ["failed"] * 2
    else:
        rest = [line for line in text.split("\n")[:-1] if "failed" not in line]
        assert all(line.startswith(logs.BAR) and line.isprintable() for line in rest)


@pytest.mark.parametrize("form", ["json"])
def test_what_json_cannot_say_is_still_logged(written: io.StringIO, form: str) -> None:
    logs.logger("slipstream.server.test").info(
        "odd", big=2**70, half="\ud800", names=["\ud800"], thing=object()
    )
    assert json.loads(written.getvalue())["big"] == str(2**70)


@pytest.mark.parametrize("form", ["json", "text"])
def test_what_clients_send_is_harmless(server: Served, written: io.StringIO, form: str) -> None:
    fields = {"model": HOSTILE, "user": HOSTILE, HOSTILE: 1, "metadata": {"a": HOSTILE}}
    server.chat(**fields)
    server.chat(**{**fields, "temperature": -1})
    server.http.get("/x%0a%1b[31m%22", headers={"user-agent": "\x1b[31m"})
    raw(
        server.port,
        b'GET /health HTTP/1.1\r\nhost: localhost\r\nx-request-id: a"b{}\x1b\r\nconnection: close\r\n\r\n',
    )
    server.engine.script = lambda request: [ValueError(HOSTILE)]
    server.chat()
    until(lambda: written.getvalue().count("/v1/chat/completions") >= 3)
    lines = written.getvalue().split("\n")[:-1]
    assert all(line.isprintable() for line in lines)
    if form == "json":
        assert all(json.loads(line)["event"] != "forged" for line in lines)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level("INFO", logger="slipstream")
    return lambda n: until(lambda: len(logged(caplog, "request")) == n) or logged(caplog, "request")


def test_the_access_line(server: Served, lines: Any) -> None:
    secret = "words that must not be logged"
    answer = server.chat(messages=[{"role": "user", "content": secret}], n=2, max_tokens=4, user="u")
    (line,) = lines(1)
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["id"] == answer.json()["id"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["n_prompt"], line["n_cached"], line["n_completion"]) == (7, 1, 8)
    assert (line["ttft_ms"], line["queue_ms"], line["reason"]) == (21.0, 1.0, "length,length")
    assert line["itl_ms"] == pytest.approx(50 / 3, abs=0.001)
    assert (line["acceptance_length"], line["acceptance_rate"]) == (2.0, 0.5)
    assert line["seconds"] > 0
    assert secret not in str(line)
    assert "w0" not in str(line)


def test_streams_and_errors_have_a_line_too(server: Served, lines: Any) -> None:
    server.events(max_tokens=4)
    (streamed,) = lines(1)
    server.chat(temperature=-1)
    *_, wrong = lines(2)
    server.engine.script = lambda request: [delta("x"), Failed(StepFailed("x"))]
    server.events()
    *_, broken = lines(3)
    server.chat()
    *_, failed = lines(4)
    assert (streamed["n_completion"], streamed["reason"]) == (4, "length")
    assert (wrong["status"], wrong["code"], wrong["level"]) == (400, "invalid_value", "info")
    assert (broken["status"], broken["code"]) == (200, "internal_error")
    assert (failed["status"], failed["code"], failed["level"]) == (500, "internal_error", "warning")
    assert "reason" not in broken


def test_probes_are_quiet(server: Served, lines: Any) -> None:
    server.engine.status = "failed"
    for path in ("/health", "/v1/health", "/live", "/ready"):
        assert server.http.get(path).status_code == 503
    server.engine.status = "ready"
    for path in ("/health", "/live", "/ready", "/metrics", "/", "/v1/models"):
        assert server.http.get(path).status_code == 200
    server.chat()
    assert len(lines(1)) == 1


def test_ids_do_not_leak_into_other_requests(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Two requests on one connection, which is one context of the event loop."""
    caplog.set_level("DEBUG", logger="slipstream")
    for number in (1, 2):
        server.post("/v1/chat/completions", chat(unknown=1), headers={"x-request-id": f"id-{number}"})
    until(lambda: len(logged(caplog, "request")) == 2)
    assert [one["request_id"] for one in logged(caplog, "unknown_fields")] == ["id-1", "id-2"]
    assert [one["request_id"] for one in logged(caplog, "request")] == ["id-1", "id-2"]


@pytest.mark.parametrize(
    ("log_format", "is_terminal", "form"),
    [("auto", True, "text"), ("auto", False, "json"), ("json", True, "json"), ("text", False, "text")],
)
def test_the_form_fits_where_it_goes(
    monkeypatch: pytest.MonkeyPatch, log_format: str, is_terminal: bool, form: str
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    assert logs.form_of(log_format, stream) == form


class Working(FakeEngine):
    """A fake whose figures move only when told."""

    n_steps = 0

    def stats(self):  # type: ignore[no-untyped-def]
        n = self.n_steps
        return replace(
            super().stats(),
            n_steps=n,
            n_prompt_tokens=100 * n,
            n_completion_tokens=50 * n,
            drafters={"suffix": counted(4 * n, 3 * n)},
        )


def test_figures_of_an_interval() -> None:
    engine = Working()
    before = engine.stats()
    engine.n_steps = 2
    assert pulse.figures(before, engine.stats(), 10.0) == {
        "running": 0,
        "waiting": 0,
        "prompt_tps": 20.0,
        "generation_tps": 10.0,
        "cache_percent": 3.1,
        "acceptance_percent": 37.5,
        "preempted": None,
    }
    assert pulse.figures(before, before, 10.0)["acceptance_percent"] is None


async def test_a_line_only_while_busy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="slipstream")
    engine = Working()
    beat = asyncio.create_task(pulse.pulse(engine, 0.01))
    await asyncio.sleep(0.1)
    assert not logged(caplog, "busy")
    engine.n_steps = 1
    await asyncio.sleep(0.1)
    assert len(logged(caplog, "busy")) == 1
    beat.cancel()


def test_reasons_of_a_stream_that_was_left(lines: Any) -> None:
    with served() as server:
        server.engine.script = lambda request: [delta("x"), 30.0, done(request, 1)]
        with server.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            next(answer.iter_lines())
        (line,) = lines(1)
        assert (line["reason"], line["status"]) == ("abort", 200)


@pytest.fixture
def root_of_its_own() -> Iterator[logging.Logger]:
    """What `configure` replaces, put back behind the test."""
    root, ours = logging.getLogger(), logging.getLogger("slipstream")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    root.handlers[:] = []
    yield root
    for one in root.handlers:
        with contextlib.suppress(OSError):  # a file on a full disk
            one.close()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_a_log_file_has_all_lines_and_one_reader(tmp_path: Path, root_of_its_own: logging.Logger) -> None:
    path = tmp_path / "server.log"
    path.write_text("before\n")
    path.chmod(0o600)
    logs.configure("info", "json", file=str(path))
    log = logs.logger("slipstream.server.test")
    log.info("first", user="ä")
    moved = path.rename(tmp_path / "server.log.1")  # as logrotate does
    log.info("second")
    old, new = moved.read_text().splitlines(), path.read_text().splitlines()
    assert old[0] == "before"
    assert [json.loads(line)["event"] for line in (*old[1:], *new)] == ["first", "second"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(root_of_its_own.handlers) == 2


def test_a_log_file_on_a_full_disk_is_told_of_once(
    root_of_its_own: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info", "json", file="/dev/full")
    log = logs.logger("slipstream.server.test")
    log.info("first")
    log.info("second")
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [one["event"] for one in told] == ["first", "log_file_incomplete", "second"]
    assert (told[1]["path"], told[1]["reason"]) == ("/dev/full", "No space left on device")
    assert len(root_of_its_own.handlers) == 2


def test_a_log_file_whose_folder_is_gone_ends_no_request(
    tmp_path: Path, root_of_its_own: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where logrotate has moved the file, and the server may make no other."""
    folder = tmp_path / "logs"
    folder.mkdir()
    logs.configure("info", "json", file=str(folder / "a.log"))
    log = logs.logger("slipstream.server.test")
    folder.rename(tmp_path / "moved")
    log.info("first")
    log.info("second")
    (tmp_path / "moved").rename(folder)
    log.info("third")
    told = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert sorted(told) == ["first", "log_file_incomplete", "second", "third"]
    assert [json.loads(line)["event"] for line in (folder / "a.log").read_text().splitlines()] == ["third"]
    assert len(root_of_its_own.handlers) == 2


def test_a_log_file_that_cannot_be_written_ends_the_start(
    tmp_path: Path, root_of_its_own: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "none" / "a.log", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "No such device or address"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.dispatch(["-m", "./no/such", "--log-file", str(path)], {})
        assert left.value.code == 2
        assert f"--log-file {path}: cannot be written to ({why})" in capsys.readouterr().err
