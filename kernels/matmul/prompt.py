"""Linear layers for many rows on Hopper, by products of warpgroups.

Each result has the bits of the kernels for fewer rows (`cuda.py`), so a token's do not tell whether it was prompted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import has_warpgroups, launch, multiprocessors
from slipstream.kernels.cuda.source import Source
from slipstream.kernels.matmul.fragments import BITS, BLOCK, INT8, NAMES, STEP, TILE, FragmentWeight

THREADS, MOST_SHARED = 384, 224 << 10  # as in prompt.cu
WIDTHS = (128, 192)  # rows of a block
LEAST_BUSY = 0.4  # of the multiprocessors; with fewer, splits side by side are faster


def _sources(codes: Sequence[str]) -> dict[torch.dtype, Source]:
    return {
        dtype: Source(
            __file__,
            "prompt.cu",
            (
                f"arrange<{name}>",
                *(f"prompt<{name}, {code}, {width}>" for code in codes for width in WIDTHS),
            ),
            early=True,
        )
        for dtype, name in NAMES.items()
    }


SOURCES = _sources([code for code in BITS if code != INT8])
OF_INT8 = _sources([INT8])  # apart, as in cuda.py


def runs(x: Tensor, n_tiles: int) -> bool:
    """Whether these rows are for this kernel: its device has it, and enough multiprocessors would have a place."""
    is_wide = x.shape[0] > WIDTHS[0] // 2 and has_warpgroups(x.device)
    return is_wide and -(-x.shape[0] // WIDTHS[0]) * n_tiles >= LEAST_BUSY * multiprocessors(x.device)


def product(x: Tensor, weight: FragmentWeight, out: Tensor, n_splits: int) -> None:
    """out = x [n_rows, n_in] times a weight of n_in columns, whose inner dimension is cut into so many splits."""
    (n_rows, n_in), (n_tiles, n_steps, n_bytes) = x.shape, weight.codes.shape
    code, words = weight.code, weight.words
    name, source = NAMES[x.dtype], (OF_INT8 if code == INT8 else SOURCES)[x.dtype]
    most = multiprocessors(x.device)
    width = _width(n_rows, n_tiles, most)
    n_across = -(-n_rows // width)
    rows = x.new_empty(n_across, n_steps, width * STEP)
    grid = (n_steps, n_across, 1)
    launch(source, f"arrange<{name}>", grid, STEP // BLOCK * width, x, rows, n_rows, n_in, width)
    wide = out.dtype == torch.float32
    stage = n_bytes + (0 if words is None else STEP // BLOCK * TILE * 4) + width * STEP * 2
    launch(
        source,
        f"prompt<{name}, {code}, {width}>",
        (min(most, n_across * n_tiles), 1, 1),
        THREADS,
        *(rows, weight.codes, words, weight.bias, None if wide else out, out if wide else None),
        *(n_rows, weight.out_features, n_steps, n_splits),
        *(0 if words is None else words.shape[1], weight.group),
        shared=MOST_SHARED // stage * stage,
    )


def _width(n_rows: int, n_tiles: int, n_blocks: int) -> int:
    """Rows of a block: more of them read weights less often, but can leave more blocks idle at the end."""
    # A place takes about as long as 64 more rows would.
    took = {width: (width + 64) * -(-(-(-n_rows // width) * n_tiles) // n_blocks) for width in WIDTHS}
    return min(WIDTHS, key=lambda width: (took[width], -width))
