"""Kept kernels that are damaged, or cannot be kept: the function runs all the same, and one line of the log says so."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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


def probe(folder: Path, **environment: str) -> list[str]:
    """What a fresh process prints."""
    ran = subprocess.run(
        [sys.executable, folder / "probe.py"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": ".", "HOME": "/nonexistent", **environment},
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


@pytest.mark.sampled(keep=2)
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
        assert "compiled in each process" in told[0]
        assert result == "7 8 0"
