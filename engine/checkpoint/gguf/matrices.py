"""Tensors of GGUF files, mapped: bytes in block types or plain numbers, and how converters' rearrangements are undone.

Rows and columns are moved without looking into blocks. Only small tensors, which are stored plain, are computed with.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.checkpoint.gguf.header import Stored
from slipstream.engine.errors import UnsupportedModel
from slipstream.kernels.matmul.blocks import BlockWeight, block_sizes
from slipstream.kernels.matmul.quantized import widened

# Types that are plain numbers.
PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
}
# Where the float16 scales of a block lie, in bytes. All other fields are whole numbers.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
Matrix = Tensor | BlockWeight
Undo = Callable[[Matrix], Matrix]  # raises ValueError for a matrix of another shape than it is for


class Places(NamedTuple):
    """Where rows or columns are stored."""

    n_stored: int
    make: Callable[[], Tensor]  # [n] int64; not before it is known that there are n_stored

    def of(self, matrix: Matrix, dimension: int) -> Tensor:
        """Those of a matrix. Raises ValueError if it has another number of rows or columns."""
        if matrix.shape[dimension] != self.n_stored:
            what = "columns" if dimension else "rows"
            raise ValueError(f"has {matrix.shape[dimension]} {what}, the heads of the file {self.n_stored}")
        return self.make()


def check_kind(stored: Stored) -> None:
    """Raises `UnsupportedModel` for a type that is neither plain numbers nor blocks whose values are known."""
    if stored.kind not in PLAIN and not _has_values(stored.kind):
        raise UnsupportedModel(f"{stored.where} has type {stored.kind}, which is not supported")


@functools.cache
def _has_values(kind: str) -> bool:
    """Whether the `gguf` package knows what blocks of a type mean."""
    from gguf import GGMLQuantizationType, quants

    try:
        n_bytes = block_sizes(kind)[1]
        quants.dequantize(np.zeros((1, n_bytes), np.uint8), GGMLQuantizationType[kind])
    except (ValueError, NotImplementedError):
        return False
    return True


def map_file(path: Path) -> mmap.mmap:
    """A whole file in memory; what is written there changes no file."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_stored(file: mmap.mmap, stored: Stored, part: int | None = None) -> Matrix:
    """A tensor of a mapped file, not copied. part: which of the matrices that three dimensions hold; None: all.

    In block types the matrices of three dimensions lie one below the other; vectors are widened. The type is one that
    `check_kind` takes.
    """
    shape, start, n_bytes = stored.shape, stored.start, stored.n_bytes
    if part is not None:
        shape, n_bytes = shape[1:], n_bytes // shape[0]
        start += part * n_bytes
    data = torch.frombuffer(file, dtype=torch.uint8, count=n_bytes, offset=start)  # [n_bytes]
    if stored.kind in PLAIN:
        return data.view(PLAIN[stored.kind]).view(shape)
    block, n_block_bytes = block_sizes(stored.kind)
    blocks = BlockWeight(data.view(-1, shape[-1] // block * n_block_bytes), stored.kind, None, torch.float32)
    return blocks if len(shape) > 1 else blocks.dense().view(shape)


def is_finite(matrix: BlockWeight) -> bool:
    """Whether no value is infinite or NaN, which none can be but by its scales."""
    if matrix.kind not in SCALES:
        return bool(matrix.dense().isfinite().all())
    blocks = matrix.data.view(-1, block_sizes(matrix.kind)[1])  # [n_blocks, bytes of a block]
    return all(
        bool(blocks[:, at : at + 2].contiguous().view(torch.float16).isfinite().all())
        for at in SCALES[matrix.kind]
    )


def as_it_is(matrix: Matrix) -> Matrix:
    return matrix


def rows(places: Places) -> Undo:
    """Output i is stored in row places[i]."""

    def undo(matrix: Matrix) -> Matrix:
        stored = places.of(matrix, 0)
        if isinstance(matrix, BlockWeight):
            return replace(matrix, data=matrix.data.index_select(0, stored))
        return matrix.index_select(0, stored)

    return undo


def columns(places: Places) -> Undo:
    """Input i is stored in column places[i]."""

    def undo(matrix: Matrix) -> Matrix:
        stored = places.of(matrix, 1)
        if isinstance(matrix, BlockWeight):
            return replace(matrix, order=torch.argsort(stored))  # which input each stored column belongs to
        return matrix.index_select(1, stored)

    return undo


def some_rows(part: Callable[[int], slice]) -> Undo:
    """Some of the rows. part: which of so many; raises ValueError for a number of rows that it cannot be."""

    def undo(matrix: Matrix) -> Matrix:
        kept = part(matrix.shape[0])
        if isinstance(matrix, BlockWeight):
            return replace(matrix, data=matrix.data[kept])
        return matrix[kept]

    return undo


def half_of_rows(second: int) -> Undo:
    """The first half of the rows (0), or the second (1)."""

    def part(n_rows: int) -> slice:
        n, odd = divmod(n_rows, 2)
        if odd:
            raise ValueError(f"has {n_rows} rows, must be an even number")
        return slice(second * n, second * n + n)

    return some_rows(part)


def numbers(change: Callable[[Tensor], Tensor]) -> Undo:
    """The change, in float32 at least."""

    def undo(matrix: Matrix) -> Matrix:
        plain = widened(matrix)
        return change(plain.to(torch.promote_types(plain.dtype, torch.float32)))

    return undo


less_one = numbers(lambda stored: stored - 1)  # norms, stored as what a row is multiplied by
log_of_negative = numbers(lambda stored: torch.log(-stored))  # rates of decay


def rotated_halves(n_heads: int, d_head: int) -> Places:
    """Of heads whose rotated pairs lie side by side: [n_heads * d_head].

    transformers rotates input j of a head with input j + d_head / 2; ggml's plain rotation, with its neighbour.
    """
    n = n_heads * d_head
    return Places(n, lambda: torch.arange(n).view(n_heads, d_head // 2, 2).transpose(1, 2).flatten())


def grouped_heads(n_groups: int, n_each: int, d_head: int, first: int = 0) -> Places:
    """Of value heads that go round the key heads, behind `first` rows left alone: [first + n_groups * n_each * d_head].

    Value head j of key head g is number g * n_each + j in transformers' order, and j * n_groups + g in ggml's, which
    repeats the key heads as a whole.
    """

    n = n_groups * n_each * d_head

    def make() -> Tensor:
        stored = torch.arange(n).view(n_each, n_groups, d_head)
        return torch.cat((torch.arange(first), first + stored.transpose(0, 1).flatten()))

    return Places(first + n, make)


def runs(n_groups: int, n_each: int, first: int) -> Places:
    """Of a row in each group of 2 * n_each the n_each from `first` on: [n_groups * n_each]."""
    n = 2 * n_groups * n_each
    return Places(n, lambda: torch.arange(n).view(n_groups, -1)[:, first : first + n_each].flatten())
