"""Attention on Hopper by products of warpgroups, for heads up to 128.

Each result has the bits of the kernel for other devices (`cuda.py`), so tests of either hold for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import has_warpgroups
from slipstream.kernels.cuda.source import Source

TEAM, GROUP = 128, 64  # as in warpgroups.cu: threads of a warpgroup, and its queries
STAGES = {1: 3, 2: 4}  # by warpgroups that multiply
TILE, ALIGNMENT = 64, 1024  # positions of a stage; bytes, as in wgmma.cuh
BLOCKS = {1: 2 * 132, 2: 132}  # that run at a time, by warpgroups that multiply, on about 132 multiprocessors
TILE_US, JOIN_US, SUMS_PER_US = 1.5, 3.0, 300_000  # of a block; what joining takes, and sums written and read
WIDTHS = (64, 128)  # values of a head; narrower ones run here, too
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
SOURCES = {
    dtype: Source(
        __file__,
        "warpgroups.cu",
        tuple(f"attention_groups<{name}, {width}, {n}>" for width in WIDTHS for n in STAGES),
        fuse=False,  # as cuda.py's, whose bits these are
        early=True,
    )
    for dtype, name in NAMES.items()
}


def runs(q: Tensor, keys: Tensor) -> bool:
    """Whether there is a kernel for these heads and this device."""
    return has_warpgroups(q.device) and keys.dtype == q.dtype and q.shape[2] <= WIDTHS[-1]


def n_blocks(n_groups: int, n_wanted: int, n_positions: int, n_sums: int) -> int:
    """Blocks that share an item: as many as find room, unless their sums cost more than they save.

    n_wanted: blocks if there is one for each item and K/V head. n_sums: floats that are kept between chunks if there
    are more.
    """
    n = max(1, BLOCKS[n_groups] // n_wanted)
    saved_us = n_positions / TILE * TILE_US * (1 - 1 / n)
    return n if saved_us > JOIN_US + n_sums / SUMS_PER_US else 1


def kernel(q: Tensor, n_groups: int) -> str:
    """The instance for so many warpgroups that multiply."""
    return f"attention_groups<{NAMES[q.dtype]}, {_width(q)}, {n_groups}>"


def n_totals(q: Tensor, n_groups: int, n_wanted: int) -> int:
    """Floats for the sums over chunks of blocks that go through all of an item's, where they are not in shared memory.

    Two blocks of one warpgroup fit a multiprocessor without them, and are slower where there are not so many.
    """
    return GROUP * _width(q) * n_wanted if n_groups == 1 and n_wanted > BLOCKS[1] // 2 else 0


def shared(q: Tensor, n_groups: int, *, sums: bool) -> int:
    """Bytes of all stages, and of the sums over chunks."""
    size = GROUP * n_groups * _width(q) * 4 if sums else 0
    return ALIGNMENT + STAGES[n_groups] * 2 * TILE * _width(q) * q.element_size() + size


def _width(q: Tensor) -> int:
    return next(width for width in WIDTHS if q.shape[2] <= width)
