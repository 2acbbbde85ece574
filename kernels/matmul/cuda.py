"""Linear layers on CUDA for few rows: weights go through the tensor cores once, whatever the number of rows.

The weight's shape alone says how the inner dimension is cut into splits and in which order they are added, so a row
has the same bits alone, beside others, and in a prompt of any length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cuda.launch import compile_for, launch, refusal
from kernels.cuda.source import Source
from kernels.matmul.packed import Packed
from kernels.torch_op import torch_op

TILE, STEP, STAGES, THREADS = 128, 64, 3, 128  # as in matmul.cu
WIDTHS = (16, 32, 64)  # rows of a block: eight times N_TILES
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
SOURCE = Source(
    __file__, "matmul.cu", tuple(f"linear<{name}, {n // 8}>" for name in NAMES.values() for n in WIDTHS)
)
SPLIT_BELOW = 256  # tiles: a weight with fewer is split, to two blocks for each of about 132 multiprocessors
SPREAD_BELOW = 256  # tiles: launches with fewer give every split a block of its own
LEAST_STEPS = 4  # of a split: with fewer the pipeline hardly starts
MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class FragmentWeight:
    """The weight in the order in which the lanes of a warp hold it in a product; padded with zeros."""

    cells: Tensor  # [n_tiles, n_steps, TILE * STEP]
    bias: Tensor | None  # [out_features]
    n_done: Tensor  # [SPREAD_BELOW] int32 zeros: splits that have ended, per tile, while a launch runs
    in_features: int
    out_features: int


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refusal(device) if dtype in NAMES else "bfloat16 and float16 only"


def prepare(device: torch.device) -> None:
    compile_for(device, SOURCE)


def pack(weight: Tensor, bias: Tensor | None = None) -> Packed:
    """As `op.pack`. Raises TypeError for other dtypes than bfloat16 and float16."""
    if weight.dtype not in NAMES:
        raise TypeError(f"cuda pack takes bfloat16 and float16, not {weight.dtype}")
    n_out, n_in = weight.shape
    padded = _padded(weight, -n_in % STEP, -n_out % TILE)
    # Outputs: tile, warp, part, half, group. Inputs: step, block of 32, pair, product, its first or last 8, element.
    parts = padded.view(-1, 4, 2, 2, 8, padded.shape[1] // STEP, 2, 4, 2, 2, 2)
    # Per tile, step, warp, block, part and product: lanes (group, pair) with four registers (half fastest) of two.
    cells = parts.permute(0, 5, 1, 6, 2, 8, 4, 7, 9, 3, 10).reshape(-1, padded.shape[1] // STEP, TILE * STEP)
    n_done = torch.zeros(SPREAD_BELOW, dtype=torch.int32, device=weight.device)
    return FragmentWeight(cells, None if bias is None else bias.contiguous(), n_done, n_in, n_out)


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    """As `op.linear`. One launch at a time may use a weight: those of one stream do."""
    if not isinstance(packed, FragmentWeight):
        raise TypeError(f"cuda linear got a {type(packed).__name__}; pack the weight with cuda too")
    if x.dtype != packed.cells.dtype or x.shape[1] != packed.in_features:
        raise ValueError(
            f"x is {x.dtype} [n_rows, {x.shape[1]}], the weight {packed.cells.dtype} [.., {packed.in_features}]"
        )
    wanted = out_dtype or x.dtype
    kept = x.dtype if wanted == x.dtype else torch.float32
    x = _padded(x, -packed.in_features % 8).contiguous()
    out = product(x, packed.cells, packed.bias, packed.n_done, packed.out_features, kept)
    return out.to(wanted)


def n_splits(n_out: int, n_in: int) -> int:
    """Into how many parts the inner dimension is cut. Part of every result's bits."""
    n_tiles, n_steps = -(-n_out // TILE), -(-n_in // STEP)
    return max(1, min(-(-SPLIT_BELOW // n_tiles), n_steps // LEAST_STEPS, MOST_SPLITS))


def empty_product(
    x: Tensor, cells: Tensor, bias: Tensor | None, n_done: Tensor, n_out: int, out_dtype: torch.dtype
) -> Tensor:
    """What `product` returns, unfilled."""
    return x.new_empty(x.shape[0], n_out, dtype=out_dtype)


@torch_op(empty_product, mutates=("n_done",))
def product(
    x: Tensor, cells: Tensor, bias: Tensor | None, n_done: Tensor, n_out: int, out_dtype: torch.dtype
) -> Tensor:
    """x [n_rows, n_in] times a packed weight, in its dtype or float32: [n_rows, n_out].

    n_in: a multiple of 8. n_done: zeros, and zeros again when it has run.
    """
    (n_rows, n_in), (n_tiles, n_steps, _) = x.shape, cells.shape
    out = empty_product(x, cells, bias, n_done, n_out, out_dtype)
    wide = out_dtype == torch.float32
    width = next((n for n in WIDTHS if n_rows <= n), WIDTHS[-1])
    row_tiles, splits = -(-n_rows // width), n_splits(n_out, n_in)
    # With many rows there are blocks enough: each runs all splits of its tile, in the same order.
    spread = splits > 1 and row_tiles * n_tiles < SPREAD_BELOW
    partials = (
        x.new_empty(row_tiles * n_tiles * splits * width * TILE, dtype=torch.float32) if spread else None
    )
    launch(
        SOURCE,
        f"linear<{NAMES[x.dtype]}, {width // 8}>",
        (row_tiles, n_tiles, splits if spread else 1),
        THREADS,
        *(x, cells, bias, None if wide else out, out if wide else None, partials, n_done),
        *(n_rows, n_in, n_out, n_steps, splits),
        shared=STAGES * STEP * (TILE + width) * x.element_size(),
    )
    return out


def _padded(matrix: Tensor, n_columns: int, n_rows: int = 0) -> Tensor:
    """With so many more columns and rows of zeros; F.pad would copy even for none."""
    return F.pad(matrix, (0, n_columns, 0, n_rows)) if n_columns or n_rows else matrix
