"""GGUF's blocks as the whole numbers and scales of CUDA's products, by torch on the device where the blocks are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.matmul.block_places import CODES, FACTORS, MINIMA
from slipstream.kernels.matmul.blocks import PIECE, BlockWeight, block_sizes
from slipstream.kernels.matmul.columns import SIXTEENS, SOURCES, SUMS, n_columns
from slipstream.kernels.matmul.formats import CHUNK, FORMATS, BlockFormat
from slipstream.kernels.matmul.quantized import is_proven

SHARED = 32  # columns that share a scale


@dataclass(frozen=True, slots=True)
class Held:
    """How a type's values are held."""

    bits: int  # of a code
    columns: str | None = None  # how inputs are spread (`columns.py`); None: as they are
    zero: int = 0  # of codes of four bits


HELD = {
    "Q4_0": Held(4, zero=8),
    "Q4_K": Held(4, SUMS),
    "Q5_K": Held(8, SUMS),
    "Q3_K": Held(4, SIXTEENS, 8),
    "Q6_K": Held(4, SIXTEENS, 8),
    **dict.fromkeys(("Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), Held(8)),
}


class Numbers(NamedTuple):
    """A value is (code - zero) * scale; codes of eight bits are int8, and have no zeros."""

    codes: Tensor  # [n_out, n_columns] uint8
    scales: Tensor  # [n_out, n_columns / 32] float32
    zeros: Tensor  # [n_out, n_columns / 32] uint8


class _Bytes:
    """Those of blocks as the expressions of `block_places.py` read them, at one place or several."""

    def __init__(self, data: Tensor) -> None:
        self.data = data  # [n_out, n_blocks, bytes of a block] uint8

    def __getitem__(self, places: int | Tensor) -> Tensor:
        """[n_out, n_blocks] int32, or with as many more as there are places."""
        at = places if isinstance(places, int) else places.long()
        return self.data[..., at].int()


def is_held(kind: str, dtype: torch.dtype) -> bool:
    """Whether matrices of a type are kept narrow for rows of that dtype."""
    if kind not in HELD or not is_proven(kind) or dtype not in (torch.bfloat16, torch.float16):
        return False
    return HELD[kind].columns is None or dtype in SOURCES


def held_bytes(weight: BlockWeight) -> int:
    """Bytes of its codes and scales on the device, but for padding; of a weight without memory too."""
    (n_out, n_in), held = weight.shape, HELD[weight.kind]
    wide = n_in if held.columns is None else n_columns(n_in, held.columns)
    return n_out * (wide * held.bits // 8 + wide // SHARED * 4)


def numbers(weight: BlockWeight) -> Numbers:
    """Those of a weight whose type is held, in the order of its stored columns."""
    n_out, n_in = weight.shape
    n_at_once = max(1, PIECE // max(1, n_in))
    pieces = [_numbers(weight.data[i : i + n_at_once], weight.kind) for i in range(0, n_out, n_at_once)]
    return Numbers(*map(torch.cat, zip(*pieces, strict=True)))


def _numbers(data: Tensor, kind: str) -> Numbers:
    form, held = FORMATS[kind], HELD[kind]
    b = _Bytes(data.unflatten(1, (-1, block_sizes(kind)[1])))
    values = _values(b, kind, form)  # [n_out, n_blocks, inputs of a block]
    scales = _scales(b, kind, form)  # [n_out, n_blocks, n_groups]
    zeros = torch.full_like(scales, held.zero, dtype=torch.uint8)
    if held.columns == SIXTEENS:
        both = values + 17 * held.zero  # what sixteens and ones stand for, less the zero of each
        both = both.unflatten(2, (-1, 16))
        codes = torch.cat((both & 15, both >> 4), 3).flatten(2)
    else:
        codes = values + held.zero & 0xFF
    if held.columns == SUMS:
        second, minima = _minima(b, kind, form)
        codes = torch.cat((codes, _of_sums(minima, held.bits)), 2)
        scales, zeros = torch.cat((scales, -second), 2), F.pad(zeros, (0, 1))
    return Numbers(codes.to(torch.uint8).flatten(1), scales.flatten(1), zeros.flatten(1))


def _values(b: _Bytes, kind: str, form: BlockFormat) -> Tensor:
    """What the codes stand for, [n_out, n_blocks, inputs of a block] int32."""
    inputs = torch.arange(form.block, dtype=torch.int32, device=b.data.device)  # [inputs of a block]
    codes = CODES[kind](b, inputs // CHUNK, inputs % CHUNK // 16, inputs % 16)
    table = torch.tensor([int(one) for one in form.values], dtype=torch.int32, device=b.data.device)
    return table[codes.long()]


def _scales(b: _Bytes, kind: str, form: BlockFormat) -> Tensor:
    """[n_out, n_blocks, n_groups] float32: products of a half and a byte, which float32 holds."""
    half = _half(b, form.half_at or 0)
    if not form.factor:
        return half
    return half * torch.stack([FACTORS[kind](b, g) for g in range(form.n_groups)], 2)


def _minima(b: _Bytes, kind: str, form: BlockFormat) -> tuple[Tensor, Tensor]:
    """The second halves [n_out, n_blocks, 1] float32, and groups' bytes [n_out, n_blocks, n_groups] int32."""
    return _half(b, form.second_at), torch.stack([MINIMA[kind](b, g) for g in range(form.n_groups)], 2)


def _half(b: _Bytes, at: int) -> Tensor:
    """[n_out, n_blocks, 1] float32."""
    return b.data[..., at : at + 2].contiguous().view(torch.float16).float()


def _of_sums(minima: Tensor, bits: int) -> Tensor:
    """The codes of a block's columns of sums. minima: [n_out, n_blocks, n_groups] of six bits."""
    low, high = (minima & 15, minima >> 4) if bits == 4 else (minima, torch.zeros_like(minima))
    return torch.stack((low, low, high, high), 3).flatten(2)
