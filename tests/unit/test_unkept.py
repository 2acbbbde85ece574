"""A disk that keeps nothing of what is compiled and proven: one warning, and `slipstream compile` is not done."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.engine.settings import Settings
from slipstream.kernels import user_cache
from slipstream.kernels.cuda import cubins
from slipstream.kernels.proof.kept_proofs import Kept
from slipstream.server.command import subcommands
from slipstream.server.command.cli import dispatch

CODE = cubins.Compiled(b"code", {}, "")


@pytest.mark.parametrize("is_full", [True, False])
def test_compile_says_what_it_could_not_keep(
    is_full: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def close() -> None:
        pass

    def load(settings: Settings) -> SimpleNamespace:
        folder = tmp_path / "kernels"
        if is_full:
            folder.touch()  # a file where the folder would be refuses as a full disk does
        cubins.store(folder, "one", CODE)
        cubins.store(folder, "other", CODE)
        with (kept := Kept(folder, "a state")).alone():
            kept.add(["norm"])
        return SimpleNamespace(close=close, info=SimpleNamespace(name="demo"))

    monkeypatch.setattr(user_cache, "unkept", {})
    monkeypatch.setattr(subcommands, "load", load)
    assert dispatch(["compile", "-m", "demo/target"], {}) == int(is_full)
    said = capsys.readouterr()
    assert [one.levelname for one in caplog.records] == ["WARNING"] * is_full
    assert ("kernels are ready" in said.out) != is_full
    assert ("kernels cannot be kept in" in said.err and "proofs of operators cannot" in said.err) == is_full


def test_a_file_that_the_disk_has_no_room_for_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_cache, "unkept", {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))  # a longer file fails as on a full disk
    try:
        cubins.store(tmp_path, "one", CODE._replace(cubin=bytes(1 << 20)))
        Kept(tmp_path, "a state").add(["norm" * (1 << 16)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert user_cache.unkept.keys() == {"kernels", "proofs of operators"}
    assert list(tmp_path.iterdir()) == []
