"""Machine code of kernels on disk: each dtype in files of its own, read rather than compiled by the next process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.kernels import compiled

ABOUT = ("kernels/*.py",)
RUN = """
import torch
from slipstream.kernels.gated import cpu
from slipstream.kernels.gated.activation import SILU
for dtype in (torch.float32, torch.bfloat16):
    cpu.gated_mul(torch.ones(2, 8, dtype=dtype), SILU)
    stats = cpu._gated[dtype, "silu"].dispatcher.stats
    print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def run(folder: Path) -> list[str]:
    """Per dtype, kernels read from the disk and compiled."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", RUN], env=env, check=True, capture_output=True, text=True)
    return done.stdout.split("\n")[:2]


@pytest.mark.sampled(keep=0, together=True)
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert run(tmp_path) == ["0 1", "0 1"]
    assert run(tmp_path) == ["1 0", "1 0"]
    assert len(list(tmp_path.rglob("*silu-float32-*.nbi"))) == 1
    assert len(list(tmp_path.rglob("*silu-uint16-*.nbi"))) == 1


def test_what_cannot_be_found_again_is_refused() -> None:
    def make(inner: object) -> object:
        def outer() -> object:
            return inner

        return compiled.kernel(outer)

    with pytest.raises(TypeError, match="has a function in its closure"):
        make(lambda: None)
