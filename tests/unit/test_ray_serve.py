"""`slipstream ray-serve`: what its command line and the arguments of a Ray file mean. Ray itself is not needed here."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from slipstream.server.command import ray_serve
from slipstream.server.command.ray_serve import RAY_SERVE, call_of
from slipstream.server.command.subcommand import parsed
from slipstream.server.http.app import create_app
from slipstream.server.http.gate import Gate
from tests.http.fake import FakeEngine

MODEL = ("-m", "folder")


def test_arguments_of_a_file_are_those_of_the_command() -> None:
    call = call_of({"model": "folder", "replicas": 4, "max_replicas": 8, "ctx_size": 4096, "slots": False})
    assert (call.settings.model, call.settings.ctx_size, call.settings.slots) == ("folder", 4096, False)
    words = [*MODEL, "--replicas", "4", "--max-replicas", "8", "--ctx-size", "4096", "--no-slots"]
    line = parsed(RAY_SERVE, ["--host", "0.0.0.0", *words], {})
    assert (line.settings, line.own) == (call.settings, call.own)
    assert (call.own["ingresses"], call.own["max_moves"], call.own["replica_cpus"]) == (1, 3, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "folder", "replica": 4}, "--replica=4"),
        ({"model": "folder", "replicas": 0}, "whole number of at least 1"),
        ({"model": "folder", "replicas": 4, "max_replicas": 2}, "--max-replicas 2: less than --replicas 4"),
        ({"model": "folder", "slot_save_path": "/tmp"}, "--slot-save-path /tmp: slots belong to replicas"),
        ({"model": "folder", "replica_cpus": "many"}, "--replica-cpus"),
        ({"replicas": 2}, "--model is needed"),
    ],
)
def test_what_means_nothing_is_refused(
    arguments: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="args of the application"):
        call_of(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"host": "0.0.0.0"}, "host: http_options"),
        ({"port": 8001}, "port: http_options"),
        ({"ray_address": "auto"}, "ray_address: the file"),
        ({"dashboard": False}, "dashboard: the file"),
        ({"api_key": ["one", "two"]}, "api_key: must be text, a number, true or false"),
    ],
)
def test_what_a_file_cannot_say_is_refused(argument: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"args of the application: {words}"):
        call_of({"model": "folder", **argument})


def test_arguments_without_a_value_are_left_out() -> None:
    absent = call_of({"model": "folder", "max_replicas": None, "api_key": None, "slots": None})
    plain = call_of({"model": "folder"})
    assert (absent.settings, absent.own) == (plain.settings, plain.own)


def test_a_unix_socket_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ray_serve.refuse(parsed(RAY_SERVE, [*MODEL, "--host", "/run/slipstream.sock"], {}))
    assert "--host /run/slipstream.sock: Ray's proxies listen on TCP ports alone" in capsys.readouterr().err


async def test_a_files_application_answers_to_any_host_name() -> None:
    """Services of Kubernetes have names of their own."""
    app = create_app(Gate(FakeEngine()), call_of({"model": "folder"}).settings)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream-serve-svc:8000") as client:
        assert (await client.get("/health")).status_code == 200


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is here")
def test_without_ray_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        RAY_SERVE.run(parsed(RAY_SERVE, MODEL, {}))
    assert ended.value.code == 2
    assert "pip install 'slipstream[ray]'" in capsys.readouterr().err


class FailedRay:
    """Ray whose replicas do not start, and all of its modules that the command asks for."""

    HTTPOptions = SimpleNamespace

    @property
    def serve(self) -> FailedRay:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None

    def run(self, *given: Any, **named: Any) -> None:
        raise RuntimeError("Failed to update the deployments ['replica'].")

    def status(self) -> Any:
        trace = "The deployment failed to start.\nTraceback\n  File x\nLoadError: /m: no such folder\n"
        parts = {
            "replica": SimpleNamespace(status="DEPLOY_FAILED", message=trace),
            "ingress": SimpleNamespace(status="UPDATING", message="has taken more than 30 s"),
        }
        return SimpleNamespace(applications={ray_serve.NAME: SimpleNamespace(deployments=parts)})


@pytest.fixture
def as_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FailedRay], int]]:
    """Runs the command with this in Ray's place; signals are then handled as before."""

    def run(ray: FailedRay) -> int:
        for name in ("ray", "ray.serve", "ray.serve.config", "slipstream.server.cluster.on_ray.application"):
            monkeypatch.setitem(sys.modules, name, ray)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
        for name in ("configure_logs", "preset"):
            monkeypatch.setattr(ray_serve, name, lambda *given: None)
        return RAY_SERVE.run(parsed(RAY_SERVE, MODEL, {}))

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_replicas_that_do_not_start_end_it_with_the_reason(
    as_ray: Callable[[FailedRay], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(ray_serve.log, "error", lambda event, reason: told.append(reason))
    assert as_ray(FailedRay()) == 3
    assert told == ["replica: LoadError: /m: no such folder"]


class HungUpRay(FailedRay):
    """Ray whose terminal is closed while replicas start."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def init(self, **named: Any) -> None:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "as Ray's processes inherit it"

    def run(self, *given: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        self.calls.append("run")

    def delete(self, name: str) -> None:
        self.calls.append(f"delete {name}")


def test_a_closed_terminal_drains(as_ray: Callable[[FailedRay], int]) -> None:
    ray = HungUpRay()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert as_ray(ray) == 0
    assert ray.calls == ["run", "delete slipstream"]
