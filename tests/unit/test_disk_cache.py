"""Kept kernels: found from every checkout; where damaged or not to be kept the function runs, and the log says so."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.kernels import disk_cache

pytestmark = pytest.mark.sampled(keep=2, together=True)

# Prints what the function gives, and how often it came from disk and was compiled.
PROBE = """
import logging, sys
logging.basicConfig(level="WARNING", stream=sys.stdout, format="log: %(message)s")
from slipstream.kernels.disk_cache import cache_on_disk
import numba
@numba.njit
def half(n):
    return n // 2
@numba.njit
def double(n):
    return n + n
for one in (half, double):
    cache_on_disk(one)
print(half(14), double(4), sum(sum(one.stats.cache_hits.values()) for one in (half, double)))
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    (folder / "probe.py").write_text(PROBE)
    assert probe(folder) == ["7 8 0"]
    assert probe(folder) == ["7 8 2"], "kept"
    return folder


def probe(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """What a fresh process prints."""
    own = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    ran = subprocess.run(
        [sys.executable, folder / "probe.py", *arguments],
        cwd=Path(__file__).parents[2],
        env={**own, "PYTHONPATH": ".", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def _flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "random": lambda data: random.Random(7).randbytes(len(data)),
    "flipped": _flip,
}


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_damaged_entry_is_compiled_again(kind: str, suffix: str, warm: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(warm, tmp_path / "copy"))
    spoiled = sorted((folder / "__pycache__").glob(f"*{suffix}"))
    assert len(spoiled) == 2
    for path in spoiled:
        path.write_bytes(WRONG[kind](path.read_bytes()))
    told, result = probe(folder)
    assert told.startswith("log: a kept kernel in")
    assert result == "7 8 0"
    assert probe(folder) == ["7 8 2"], "and kept again"


# Files are made, but take no byte.
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
READ_ONLY = (
    FULL
    + """
import tempfile
def refuse(**options):
    raise OSError(30, "Read-only file system")
tempfile.TemporaryFile = refuse
"""
)


@pytest.mark.parametrize("prelude", [FULL, READ_ONLY], ids=["full", "read-only"])
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_a_folder_that_takes_nothing_is_read_at_least(
    prelude: str, is_warm: bool, warm: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(warm, tmp_path / "copy"))
    if not is_warm:
        shutil.rmtree(folder / "__pycache__")
    (folder / "sitecustomize.py").write_text(prelude)
    *told, result = probe(folder, PYTHONPATH=f".:{folder}")
    if is_warm:
        assert (told, result) == ([], "7 8 2")
    else:
        assert len(told) == 1
        assert "kernels cannot be kept" in told[0]
        assert result == "7 8 0"


# The same functions as a module of the package, for sources of which the digest is given.
OF_PACKAGE = """
import sys
sys.modules["slipstream.probe"] = sys.modules[__name__]
__name__ = "slipstream.probe"
""" + PROBE.replace("cache_on_disk(one)", "cache_on_disk(one, sys.argv[1])")
STATE, LATER = "0123456789abcdef" * 4, "fedcba9876543210" * 4


def checkout(folder: Path) -> Path:
    folder.mkdir()
    (folder / "probe.py").write_text(OF_PACKAGE)
    return folder


def test_checkouts_with_the_same_sources_share_what_is_kept(tmp_path: Path) -> None:
    one, other, home = checkout(tmp_path / "one"), checkout(tmp_path / "other"), str(tmp_path / "home")
    assert probe(one, STATE, XDG_CACHE_HOME=home) == ["7 8 0"]
    assert probe(other, STATE, XDG_CACHE_HOME=home) == ["7 8 2"]
    assert probe(other, LATER, XDG_CACHE_HOME=home) == ["7 8 0"], "sources that differ"
    assert probe(one, STATE, XDG_CACHE_HOME=home) == ["7 8 2"], "and took nobody's place"
    assert not (one / "__pycache__").exists()


def test_without_a_cache_of_the_users_kernels_lie_beside_their_source(tmp_path: Path) -> None:
    folder, home = checkout(tmp_path / "one"), tmp_path / "home"
    home.touch()  # no folder
    assert probe(folder, STATE, XDG_CACHE_HOME=str(home)) == ["7 8 0"]
    assert probe(folder, STATE, XDG_CACHE_HOME=str(home)) == ["7 8 2"]
    assert probe(folder, LATER, XDG_CACHE_HOME=str(home)) == ["7 8 0"], "sources that differ"
    assert len(list((folder / "__pycache__").glob("*.nbi"))) == 2


def test_what_was_not_used_lately_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MOST_KEPT", 3)
    for age, name in enumerate(["youngest", "second", "third", STATE[:16]]):
        (tmp_path / name / "slipstream.probe").mkdir(parents=True)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    assert disk_cache._state.__wrapped__(tmp_path, STATE) == tmp_path / STATE[:16]
    assert {one.name for one in tmp_path.iterdir()} == {"youngest", "second", STATE[:16]}
