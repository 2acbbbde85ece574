"""What supervisors see: `slipstream healthcheck`, systemd's notifications, the start-up block."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from slipstream.engine.settings import Settings
from slipstream.server import version
from slipstream.server.command import cli, startup
from slipstream.server.command.healthcheck import healthcheck
from slipstream.server.command.notify import notify
from slipstream.server.command.serve import run
from slipstream.server.openai.formats.known import BY_NAME, NONE
from slipstream.server.openai.formats.reading import Known
from tests.commanded import read_settings
from tests.http.entry import load
from tests.http.fake import INFO, FakeEngine, delta, done
from tests.http.serving import chat, logged, served
from tests.http.test_lifecycle import Process


def check(capsys: pytest.CaptureFixture[str], *arguments: str, **environ: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    try:
        status = cli.dispatch(["healthcheck", *arguments], environ)
    except SystemExit as left:
        status = int(left.code or 0)
    told = capsys.readouterr()
    return status, (told.out + told.err).strip()


def test_a_ready_server_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with served(api_key="k") as server:
        assert check(capsys, "--port", str(server.port)) == (0, "ok")
        assert check(capsys, "--url", server.url) == (0, "ok")
        assert check(capsys, "--url", f"{server.url}/") == (0, "ok")
        assert check(capsys, SLIPSTREAM_PORT=str(server.port), SLIPSTREAM_HOST="0.0.0.0") == (0, "ok")
        # The rest of the server's environment does not disturb.
        assert check(
            capsys, SLIPSTREAM_PORT=str(server.port), SLIPSTREAM_MODEL="m", SLIPSTREAM_API_KEY="k"
        ) == (0, "ok")
        server.engine.status = "draining"
        assert check(capsys, "--url", server.url) == (1, "draining")
        server.engine.status = "failed"
        assert check(capsys, "--url", server.url) == (1, "failed")


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        number = silent.getsockname()[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("slipstream.server.command.healthcheck.TIMEOUT_S", 0.2)
            assert check(capsys, "--port", str(number)) == (1, "no answer: timed out")
    status, told = check(capsys, "--port", str(number))
    assert (status, told[:10]) == (1, "no answer:")
    with served(loaded=False) as server:
        assert check(capsys, "--url", server.url) == (1, "loading")
        assert check(capsys, "--url", f"{server.url}/elsewhere")[0] == 1


@pytest.mark.parametrize("arguments", [["--nope"], ["-m", "x"], ["--port", "many"], ["--port", "70000"]])
def test_bad_usage_of_the_check(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert check(capsys, *arguments)[0] == 2


def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, "--url", "localhost:80") == (
        1,
        "no answer: --url: must be http://HOST:PORT or https://HOST:PORT",
    )


def test_a_port_that_is_none_asks_no_other_server(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as server:
        status, told = check(capsys, "--url", f"http://127.0.0.1:{server.port + 65536}")
    assert (status, told) == (1, "no answer: --url: Port out of range 0-65535")


def test_the_check_goes_where_the_server_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "s.sock")
    with served(host=path, api_prefix="/llm"):
        assert check(capsys, "--host", path, "--api-prefix", "/llm") == (0, "ok")
        status, told = check(capsys, "--host", path)
        assert (status, told.split(":")[:2]) == (1, ["http", "//localhost/health answers 404 and no status"])
        config = tmp_path / "server.toml"
        config.write_text(f'host = "{path}"\napi-prefix = "/llm"\nmodel = "m"\n')
        assert check(capsys, "--config", str(config)) == (0, "ok")
        assert check(capsys, SLIPSTREAM_CONFIG=str(config)) == (0, "ok")


def test_the_check_over_https(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    issued = trustme.CA().issue_cert(
        "my.example"
    )  # a public name, and an authority this machine does not know
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(cert)
    files = {"ssl_key_file": str(key), "ssl_cert_file": str(cert)}
    context = ssl.create_default_context()
    with served(trusted=context, **files) as server:
        assert healthcheck(Settings(port=server.port, **files), None) == (0, "ok")
        status, told = healthcheck(Settings(), server.url)  # somewhere else, so the certificate must be right
        assert (status, "certificate" in told.lower()) == (1, True)


def test_the_command() -> None:
    """The sub-command by its name, and that it needs no model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["slipstream", "healthcheck", "--url", "http://127.0.0.1:1"])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert left.value.code == 1


# --- systemd ---


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(str(tmp_path / "notify"))
        one.settimeout(60)
        yield one


def test_systemd_hears_when_it_is_ready_and_when_it_stops(
    tmp_path: Path, supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", supervisor.getsockname())
    server = Process(tmp_path / "log", "--port", "0", "-m", "fake")
    try:
        assert supervisor.recv(100) == b"READY=1"
        server.popen.send_signal(signal.SIGTERM)
        assert supervisor.recv(100) == b"STOPPING=1"
        assert server.exits() == 0
    finally:
        server.popen.kill()


def test_a_server_that_does_not_load_is_never_ready(supervisor: socket.socket) -> None:
    assert run(Settings(model="BROKEN", port=0), load, supervisor.getsockname()) == 3
    supervisor.settimeout(0.1)
    with pytest.raises(TimeoutError):
        supervisor.recv(100)


def test_sockets_without_a_name_and_without_anybody(
    tmp_path: Path, supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind("\0slipstream-test")
        one.settimeout(60)
        notify("@slipstream-test", "READY=1")
        assert one.recv(100) == b"READY=1"
    notify(str(tmp_path / "nobody"), "READY=1")
    monkeypatch.chdir(tmp_path)
    for address in (None, "", "notify"):  # the last leads to the supervisor, and is no address of systemd's
        notify(address, "READY=1")
    supervisor.settimeout(0.1)
    with pytest.raises(TimeoutError):
        supervisor.recv(100)


def test_the_unit_in_the_documentation_starts(tmp_path: Path) -> None:
    text = (Path(cli.__file__).parents[3] / "docs" / "systemd.md").read_text()
    (start,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    keys = tmp_path / "api-keys"
    keys.write_text("key")
    _, *arguments = (
        start.removeprefix("ExecStart=").replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)).split()
    )
    settings = read_settings(arguments, {})
    assert settings.api_key_file == str(keys)
    (stops_s,) = [
        int(line.partition("=")[2]) for line in text.splitlines() if line.startswith("TimeoutStopSec=")
    ]
    assert stops_s > settings.shutdown_timeout


# --- the start-up block ---


def test_the_block_as_an_event(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level("INFO", logger="slipstream")
    run(Settings(model="DYING", port=0, log_format="json", api_key="secret-key"), load)
    (told,) = logged(caplog, "ready")
    assert (told["model"], told["n_params"], told["device"], told["dtype"]) == (
        "fake/model",
        1_000_000,
        "cpu",
        "float32",
    )
    assert (told["n_ctx"], told["n_slots"], told["max_queue"], told["max_body_mib"]) == (512, 4, 64, 8)
    assert (told["drafters"], told["api_keys"]) == ("prediction,draft-model,ngram-simple", 1)
    assert told["url"].startswith("http://127.0.0.1:")
    out = capsys.readouterr().out
    assert "secret-key" not in str(told) + out
    assert out.startswith("fake/model is ready on http://127.0.0.1:")
    assert "n ctx" not in out


@pytest.mark.parametrize(
    ("changed", "settings", "told"),
    [
        (
            {},
            {},
            "  speculation  prediction, draft-model, ngram-simple; up to 16 tokens a step, as long as they pay\n",
        ),
        ({}, {"spec_adaptive": False}, "up to 16 tokens a step, always\n"),
        ({"drafters": ()}, {}, "  speculation  off\n"),
        ({"inexact_sums": "other bits"}, {}, "  rank sums    other bits\n"),
        ({}, {"draft_max": 0}, "  speculation  off\n"),
        ({}, {"chat_format": "hermes"}, "  chat format  hermes: tools and thinking\n"),
        ({}, {"chat_format": "harmony"}, "  chat format  harmony: tools and thinking\n"),
        ({}, {"chat_format": "llama3"}, "  chat format  llama3: tools\n"),
        (
            {},
            {"chat_format": "generic"},
            "  chat format  generic: tools by a system message, as the template",
        ),
        ({}, {"chat_format": "none"}, "  chat format  none: no tool calls\n"),
        ({"chat_template": ""}, {}, "  chat format  the model has no chat template: /v1/completions only\n"),
        ({}, {"api_prefix": "/llm"}, "  chat page    http://127.0.0.1:80/llm/\n"),
        ({}, {"api_prefix": "/llm"}, "  API          http://127.0.0.1:80/llm/v1\n"),
        ({}, {"shutdown_timeout": 5}, "Ctrl-C, and running requests may end within 5 s; twice: at once\n"),
    ],
)
def test_the_welcome_says_what_a_user_needs(
    changed: dict[str, Any], settings: dict[str, Any], told: str
) -> None:
    known = Known(BY_NAME[settings.get("chat_format", "none")])
    told_all = startup.welcome(replace(INFO, **changed), Settings(model="x", port=80, **settings), 80, known)
    assert told in told_all


def test_a_unix_socket_has_no_page() -> None:
    told = startup.welcome(INFO, Settings(model="x", host="/tmp/s.sock"), None, Known(NONE))
    assert "chat page" not in told
    assert "  API          --unix-socket /tmp/s.sock http://localhost\n" in told


def test_the_block_as_a_table(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level("INFO", logger="slipstream")
    run(Settings(model="DYING", port=0, log_format="text"), load)
    assert not logged(caplog, "ready")
    out = capsys.readouterr().out
    assert "  n params           1,000,000\n" in out
    assert "  request timeout s  none\n" in out


def test_the_table_shows_every_fact() -> None:
    told = startup.facts(INFO, Settings(model="x", port=80), 80, Known(NONE), 1.25)
    assert len(startup.table(told).splitlines()) == len(told)
    assert json.dumps(told)
    assert told["activations"] == told["dtype"]
    rounding = Settings(model="x", port=80, round_activations=True)
    assert startup.facts(INFO, rounding, 80, Known(NONE), 1.25)["activations"] == "8 bits in products"


# --- readiness ---


def test_ready_tells_whether_a_slot_is_idle() -> None:
    with served(FakeEngine()) as server, contextlib.ExitStack() as held:
        assert server.http.get("/ready?fail_on_no_slot=1").json() == {"status": "ok"}
        assert server.http.get("/ping").json() == {"status": "ok"}
        assert server.http.get("/version").json() == {"version": version()}
        assert server.http.get("/load").json() == {"server_load": 0}
        server.engine.script = lambda request: [delta("x"), 30.0, done(request, 1)]
        body = chat(stream=True, n=4)
        answer = held.enter_context(server.http.stream("POST", "/v1/chat/completions", json=body))
        lines = answer.iter_lines()  # dropping the iterator would close the connection
        next(lines)
        assert server.http.get("/load").json() == {"server_load": 4}
        busy = server.http.get("/ready?fail_on_no_slot=1")
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "no_idle_slot")
        for path in ("/ready", "/health", "/ready?fail_on_no_slot=0"):
            assert server.http.get(path).status_code == 200
