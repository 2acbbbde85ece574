"""`slipstream ray-serve`: what its command line and the arguments of a Ray file mean. Ray itself is not needed here."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from slipstream.server.command.ray_serve import RAY_SERVE, call_of
from slipstream.server.command.subcommand import parsed

MODEL = ("-m", "folder")


def test_arguments_of_a_file_are_those_of_the_command() -> None:
    call = call_of({"model": "folder", "replicas": 4, "max_replicas": 8, "ctx_size": 4096, "slots": False})
    assert (call.settings.model, call.settings.ctx_size, call.settings.slots) == ("folder", 4096, False)
    words = [*MODEL, "--replicas", "4", "--max-replicas", "8", "--ctx-size", "4096", "--no-slots"]
    line = parsed(RAY_SERVE, words, {})
    assert (line.settings, line.own) == (call.settings, call.own)
    assert (call.own["ingresses"], call.own["max_moves"], call.own["replica_cpus"]) == (1, 3, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "folder", "replica": 4}, "--replica=4"),
        ({"model": "folder", "replicas": 0}, "whole number of at least 1"),
        ({"model": "folder", "replicas": 4, "max_replicas": 2}, "--max-replicas 2: less than --replicas 4"),
        ({"model": "folder", "slot_save_path": "/tmp"}, "--slot-save-path /tmp: slots belong to replicas"),
        ({"model": "folder", "host": "/run/slipstream.sock"}, "TCP ports alone"),
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


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is here")
def test_without_ray_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        RAY_SERVE.run(parsed(RAY_SERVE, MODEL, {}))
    assert ended.value.code == 2
    assert "pip install 'slipstream[ray]'" in capsys.readouterr().err
