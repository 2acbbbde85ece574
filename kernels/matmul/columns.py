"""Inputs as columns, for those of GGUF's types that are more than whole numbers with a scale for each 32 inputs.

CUDA's products know such numbers, of four or eight bits, and nothing else. With SUMS a minimum is a number, too: its
column holds the sum of the inputs that it is subtracted with, in two parts, which lack at most 2^-17 of it. With
SIXTEENS two numbers of four bits, one of them for 16 times the input, make one of eight that shares a scale with 15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import launch
from slipstream.kernels.cuda.source import Source

SUMS, SIXTEENS = "with_sums", "with_sixteens"  # kernels of columns.cu
THREADS, EACH = 128, 8  # as there: of a block, and a thread's inputs
BLOCK, N_SUMS = 256, 32  # as there: inputs, and the columns of sums behind them
# 16 times an input may be more than float16 has.
SOURCES = {
    torch.bfloat16: Source(__file__, "columns.cu", (f"{SUMS}<bfloat16>", f"{SIXTEENS}<bfloat16>"), early=True)
}


def n_columns(n_in: int, columns: str) -> int:
    """Of so many inputs, a multiple of 256."""
    return 2 * n_in if columns == SIXTEENS else n_in // BLOCK * (BLOCK + N_SUMS)


def spread(x: Tensor, columns: str) -> Tensor:
    """x: [n_rows, n_in] bfloat16. Returns [n_rows, n_columns(n_in, columns)], the same dtype."""
    n_rows, n_in = x.shape
    wide = x.new_empty(n_rows, n_columns(n_in, columns))
    grid = (-(-n_in // (THREADS * EACH)), n_rows, 1)
    launch(SOURCES[x.dtype], f"{columns}<bfloat16>", grid, THREADS, x.contiguous(), wide, n_in)
    return wide
