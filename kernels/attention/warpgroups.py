"""Attention of many queries over the same keys and values on Hopper, by products of warpgroups.

Each result has the bits of the kernel for fewer queries (`cuda.py`), so a token's do not tell whether it was prompted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import has_warpgroups
from slipstream.kernels.cuda.source import Source

TEAM, GROUP = 128, 64  # as in warpgroups.cu: threads of a warpgroup, and its queries
STAGES = {1: 3, 2: 4}  # by warpgroups that multiply
TILE, ALIGNMENT = 64, 1024  # positions of a stage; bytes, as in wgmma.cuh
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


def kernel(q: Tensor, n_groups: int) -> str:
    """The instance for so many warpgroups that multiply."""
    return f"attention_groups<{NAMES[q.dtype]}, {_width(q)}, {n_groups}>"


def shared(q: Tensor, n_groups: int, *, walks: bool) -> int:
    """Bytes of all stages, and of the sums over chunks where a block goes through all of them."""
    totals = GROUP * n_groups * _width(q) * 4 if walks else 0
    return ALIGNMENT + STAGES[n_groups] * 2 * TILE * _width(q) * q.element_size() + totals


def _width(q: Tensor) -> int:
    return next(width for width in WIDTHS if q.shape[2] <= width)
