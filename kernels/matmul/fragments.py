"""Weights in the order in which the lanes of a warp hold them in a product: of 16 bits, or codes of 8 and 4.

Codes stay packed where the kernel can multiply with them and scale the sums; else they are widened here. Outputs are
rows of such a matrix, what they multiply its columns: inputs, or what `columns.py` makes of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.matmul.block_numbers import HELD, SHARED, is_held, numbers
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, Quantized, is_proven, widened

TILE, STEP, BLOCK = 128, 64, 32  # as in fragments.cuh
PLAIN, E4M3, INT8, INT4 = "Plain", "E4m3", "Int8", "Int4"  # codes, as in fragments.cuh
BITS = {PLAIN: 16, E4M3: 8, INT8: 8, INT4: 4}
CODES = tuple(BITS)
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # of dtypes, in kernels' names
E4M3_NAN = 0x7F
# Of scales: sums are brought from one to the next by their quotient.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-60, 2.0**60
ZERO_BITS = 0x1F  # of a word; fragments.cuh
ONE_BITS = 0x3F800000  # of 1 as a float


@dataclass(frozen=True, slots=True)
class FragmentWeight:
    """A weight of `dtype`, padded with zeros to whole tiles and steps."""

    code: str  # PLAIN, E4M3, INT8 or INT4
    codes: Tensor  # [n_tiles, n_steps, bytes of TILE * STEP weights] uint8
    words: Tensor | None  # [n_tiles, n_groups, TILE] int32: what codes stand for; None: they are values
    group: int  # inputs that share a word
    columns: str | None  # how inputs are spread over columns (`columns.py`); None: one each
    order: Tensor | None  # [in_features] int64: which input stands where before that; None: each at its own
    bias: Tensor | None  # [out_features]
    n_done: Tensor  # [tiles of one launch at most] int32 zeros: splits that have ended, while a launch runs
    dtype: torch.dtype
    in_features: int
    out_features: int


class Coded(NamedTuple):
    """Codes in the kernel's order, and what they stand for."""

    code: str
    codes: Tensor  # [n_tiles, n_steps, bytes] uint8
    words: Tensor | None  # [n_tiles, n_groups, TILE] int32
    group: int
    columns: str | None = None


def coded(weight: Tensor | Quantized) -> Coded:
    """As the kernel reads it; widened if it is a quantised weight whose groups or scales the kernel cannot take."""
    packed = None
    if isinstance(weight, Int4Weight):
        codes = torch.stack((weight.codes & 15, weight.codes >> 4), 2).flatten(1)  # [out, in]
        packed = _int4(codes, weight.scales, weight.zeros, weight.shape[1] // weight.scales.shape[1])
    elif isinstance(weight, ByteWeight):
        packed = _bytes(weight)
    elif isinstance(weight, BlockWeight) and is_held(weight.kind, weight.dtype):
        packed = _blocks(weight)
    if packed is not None:
        return packed
    # Outputs and inputs as in `_parts`; lanes are (group, pair), a register is two inputs, halves are the fastest.
    cells = _parts(widened(weight)).permute(0, 5, 1, 6, 2, 8, 4, 7, 9, 3, 10)
    return Coded(PLAIN, _rows(cells).view(torch.uint8), None, BLOCK)


def _blocks(weight: BlockWeight) -> Coded | None:
    """None if a scale is too small or too large."""
    (codes, scales, zeros), held = numbers(weight), HELD[weight.kind]
    of_eight = held.bits == 8
    found = _scaled(INT8, codes, scales, SHARED) if of_eight else _int4(codes, scales, zeros, SHARED)
    return None if found is None else found._replace(columns=held.columns)


def _int4(codes: Tensor, scales: Tensor, zeros: Tensor, n_shared: int) -> Coded | None:
    """None if groups begin within a block, or a scale leaves no room for the zero.

    codes: [out, columns] uint8. scales, zeros: [out, n_groups] float32 and uint8, each of so many columns.
    """
    n_out, n_in = codes.shape
    group = _group(n_shared, n_in)
    scale_bits = scales.view(torch.int32)  # [out, n_groups]
    if group is None or (scale_bits & ZERO_BITS).any() or not _usable(scales):
        return None
    scale_bits, zeros = scale_bits.clone(), zeros.int()
    is_nothing = scales == 0  # [out, n_groups]
    if is_nothing.any():
        scale_bits[is_nothing], zeros[is_nothing] = ONE_BITS, 0
        codes.view(n_out, is_nothing.shape[1], -1)[is_nothing] = 0
    # Per tile, step, warp, block, part, lane and product: 32 bits, of which a byte holds both halves of a register.
    nibbles = _parts(codes).permute(0, 5, 1, 6, 2, 4, 7, 8, 10, 9, 3)
    words = _tiled(scale_bits | zeros, group, n_in)
    return Coded(INT4, _rows(nibbles[..., 0] | nibbles[..., 1] << 4), words, group)


def _bytes(weight: ByteWeight) -> Coded | None:
    """None if blocks begin within one of the kernel's, or there are NaN."""
    codes = weight.codes.view(torch.uint8)
    code = INT8 if weight.codes.dtype is torch.int8 else E4M3
    if code == INT8 and not is_proven("int8"):
        return None
    if code == E4M3 and (codes & E4M3_NAN == E4M3_NAN).any():
        return None
    of_output = torch.arange(weight.shape[0], device=codes.device) // weight.block[0]  # [out]
    return _scaled(code, codes, weight.scales[of_output], weight.block[1])


def _scaled(code: str, codes: Tensor, scales: Tensor, n_shared: int) -> Coded | None:
    """codes: [out, columns] uint8. scales: [out, n_groups] float32, each of so many columns; may be changed."""
    n_in = codes.shape[1]
    group = _group(n_shared, n_in)
    if group is None or not _usable(scales):
        return None
    is_nothing = scales == 0
    if is_nothing.any():
        scales[is_nothing] = 1.0
        codes = codes.masked_fill(is_nothing.repeat_interleave(n_shared, 1)[:, :n_in], 0)
    cells = _parts(codes).permute(0, 5, 1, 6, 2, 4, 7, 8, 9, 10, 3)
    return Coded(code, _rows(cells), _tiled(scales.view(torch.int32), group, n_in), group)


def _usable(scales: Tensor) -> bool:
    """Whether quotients of any two are normal floats; zeros are replaced, as no sum can be brought to such a scale."""
    sizes = scales.abs()
    return bool(((sizes == 0) | (sizes >= SMALLEST_SCALE) & (sizes <= LARGEST_SCALE)).all())


def _group(n_shared: int, n_in: int) -> int | None:
    """Inputs that share a word, for the kernel; None where it would have to change within a block."""
    if n_shared >= n_in:
        return -(-n_in // STEP) * STEP
    return n_shared if n_shared % BLOCK == 0 else None


def _parts(weight: Tensor) -> Tensor:
    """[out, in], padded, by where a lane finds a weight.

    Outputs: tile, warp, part, half, group. Inputs: step, block of 32, pair, product, its first or last 8, element.
    """
    n_out, n_in = weight.shape
    padded = with_zeros(weight, -n_in % STEP, -n_out % TILE)
    return padded.view(-1, 4, 2, 2, 8, padded.shape[1] // STEP, 2, 4, 2, 2, 2)


def _rows(cells: Tensor) -> Tensor:
    """[n_tiles, n_steps, the rest], contiguous."""
    return cells.reshape(*cells.shape[:2], -1)


def _tiled(words: Tensor, group: int, n_in: int) -> Tensor:
    """Words of outputs and groups for the kernel: [n_tiles, n_groups, TILE], those of a lane's outputs side by side."""
    n_out, n_groups = words.shape
    n_covering = -(-(-(-n_in // STEP) * STEP) // group)  # the last step may be padded with a group of its own
    padded = F.pad(words, (0, n_covering - n_groups, 0, -n_out % TILE), value=ONE_BITS)
    lanes = padded.view(-1, 4, 2, 2, 8, n_covering)
    return _rows(lanes.permute(0, 5, 1, 4, 2, 3))  # tile, group, warp, group, part, half


def with_zeros(matrix: Tensor, n_columns: int, n_rows: int = 0) -> Tensor:
    """With so many more columns and rows of zeros; F.pad would copy even for none."""
    return F.pad(matrix, (0, n_columns, 0, n_rows)) if n_columns or n_rows else matrix
