"""A system without a folder that temporary files could be made in: what needs none runs, what does ends in a line."""

from __future__ import annotations

import errno
import tempfile
from typing import NoReturn

import pytest
import torch

from slipstream.engine.errors import LoadError
from slipstream.engine.service.run.rank_processes import RankProcesses
from slipstream.kernels.proof import proving
from slipstream.kernels.proof.proving import Task
from slipstream.server.command.cli import dispatch


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/gone']")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", refuse)


def test_operators_are_proven_all_the_same() -> None:
    (tried,) = proving.run([Task("cpu", "bfloat16", "gated", ("cpu",))], 1)
    assert (tried.proven, tried.failed) == ("cpu", ())


def test_a_chat_with_a_server_of_its_own_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["chat", "-m", "demo/target"], {}) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "['/gone']; TMPDIR may name one" in line


def test_ranks_name_it_too() -> None:
    with pytest.raises(LoadError, match=r"'/gone'\]; TMPDIR may name one"):
        RankProcesses(2, torch.device("cpu"), {})


def test_a_trace_names_it_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["profile", "-m", "demo/target", "--trace", "trace.json"], {}) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("slipstream profile: --trace trace.json: no folder for temporary files")
    assert "['/gone']; TMPDIR may name one" in line
