"""Weights in the order in which the lanes of a warp hold them in a product: of 16 bits, or codes of 8 and 4.

Codes stay packed where the kernel's arithmetic gives exactly the values they stand for; else they are widened here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, Quantized, widened

TILE, STEP, BLOCK = 128, 64, 32  # as in fragments.cuh
BITS = (16, 8, 4)  # of a weight
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # of dtypes, in kernels' names
E4M3_NAN = 0x7F
RAISED = 2.0**120  # what a code's bits lack as float32; fragments.cuh
LARGEST_SCALE = 2.0**8  # of fp8: RAISED times it is float32's infinity
ZERO_BITS = 0x1F  # of a word; fragments.cuh


@dataclass(frozen=True, slots=True)
class FragmentWeight:
    """A weight of `dtype`, padded with zeros to whole tiles and steps."""

    codes: Tensor  # [n_tiles, n_steps, bytes of TILE * STEP weights] uint8
    words: Tensor | None  # [n_tiles, n_groups, TILE] int32: what codes stand for; None: they are values
    group: int  # inputs that share a word
    order: Tensor | None  # [in_features] int64: input of each column; None: its own
    bias: Tensor | None  # [out_features]
    n_done: Tensor  # [tiles of one launch at most] int32 zeros: splits that have ended, while a launch runs
    dtype: torch.dtype
    in_features: int
    out_features: int


class Coded(NamedTuple):
    """Codes in the kernel's order, and what they stand for."""

    codes: Tensor  # [n_tiles, n_steps, bytes] uint8
    words: Tensor | None  # [n_tiles, n_groups, TILE] int32
    group: int


def coded(weight: Tensor | Quantized) -> Coded:
    """As the kernel reads it; a quantised weight that it cannot widen exactly as `dense()` does, widened."""
    packed = None
    if isinstance(weight, Int4Weight):
        packed = _int4(weight)
    elif isinstance(weight, ByteWeight) and weight.codes.dtype is not torch.int8:
        packed = _fp8(weight)
    if packed is not None:
        return packed
    # Outputs and inputs as in `_parts`; lanes are (group, pair), a register is two inputs, halves are the fastest.
    cells = _parts(widened(weight)).permute(0, 5, 1, 6, 2, 8, 4, 7, 9, 3, 10)
    return Coded(_rows(cells).view(torch.uint8), None, BLOCK)


def _int4(weight: Int4Weight) -> Coded | None:
    """None if groups begin within a block, or scales are finer than the kernel's arithmetic."""
    group = _group(weight.shape[1] // weight.scales.shape[1], weight.shape[1])
    words = _int4_words(weight)
    if group is None or words is None:
        return None
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), 2).flatten(1)  # [out, in]
    # Per tile, step, warp, block, part, lane and product: 32 bits, of which a byte holds both halves of a register.
    nibbles = _parts(codes).permute(0, 5, 1, 6, 2, 4, 7, 8, 10, 9, 3)
    return Coded(_rows(nibbles[..., 0] | nibbles[..., 1] << 4), _tiled(words, group, weight.shape[1]), group)


def _int4_words(weight: Int4Weight) -> Tensor | None:
    """[out, n_groups] int32, as fragments.cuh describes them; None unless (code - zero) * scale comes out exact.

    It does if the scale is a sum of two values of the dtype, the second so short that its last five bits are free,
    and fifteen times the scale, hence every product, is a float32.
    """
    scales = weight.scales
    upper = scales.to(weight.dtype)
    rest = (scales - upper.float()).to(weight.dtype)
    rest_bits = rest.view(torch.int16).int() & 0xFFFF
    exact = (upper.float() + rest.float() == scales) & (rest_bits & ZERO_BITS == 0)
    exact &= (scales * 15).double() == scales.double() * 15
    if not (exact & (scales * 16).to(weight.dtype).isfinite()).all():
        return None
    return upper.view(torch.int16).int() << 16 | rest_bits | weight.zeros.int()


def _fp8(weight: ByteWeight) -> Coded | None:
    """None if blocks begin within one of the kernel's, there are NaN, or scales that it would make infinite."""
    n_out, n_in = weight.shape
    group = _group(weight.block[1], n_in)
    codes = weight.codes.view(torch.uint8)
    usable = not (codes & E4M3_NAN == E4M3_NAN).any() and (weight.scales.abs() < LARGEST_SCALE).all()
    if group is None or not usable:
        return None
    of_output = torch.arange(n_out, device=codes.device) // weight.block[0]  # [out]
    words = (weight.scales * RAISED).view(torch.int32)[of_output]
    cells = _parts(codes).permute(0, 5, 1, 6, 2, 4, 7, 8, 9, 3, 10)
    return Coded(_rows(cells), _tiled(words, group, n_in), group)


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
    padded = with_zeros(words, n_covering - n_groups, -n_out % TILE)
    lanes = padded.view(-1, 4, 2, 2, 8, n_covering)
    return _rows(lanes.permute(0, 5, 1, 4, 2, 3))  # tile, group, warp, group, part, half


def with_zeros(matrix: Tensor, n_columns: int, n_rows: int = 0) -> Tensor:
    """With so many more columns and rows of zeros; F.pad would copy even for none."""
    return F.pad(matrix, (0, n_columns, 0, n_rows)) if n_columns or n_rows else matrix
