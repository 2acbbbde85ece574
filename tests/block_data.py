"""Random matrices in GGUF's block types, and the numbers in them as gguf's own reading of altered blocks shows them."""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Where the halves of a block lie that are scales (or minima), in bytes; other bytes may have any value.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# (first byte, bytes) of a block that give every group the factor 1, and no second factor.
FACTORS_OF_ONE = {
    "Q2_K": (0, bytes([0x01] * 16)),
    "Q3_K": (96, bytes([0x11] * 8 + [0xAA] * 4)),  # 33 - 32
    "Q4_K": (4, bytes([1] * 4 + [0] * 4 + [1] * 4)),
    "Q5_K": (4, bytes([1] * 4 + [0] * 4 + [1] * 4)),
    "Q6_K": (192, bytes([1] * 16)),
    "IQ4_XS": (2, bytes([0xAA, 0xAA] + [0x11] * 4)),  # 33 - 32
    "MXFP4": (0, bytes([128])),
}


def block_bytes(kind: str, n_out: int, n_in: int, seed: int = 0) -> Tensor:
    """[n_out, n_in / block * bytes of a block] uint8: any codes; scales and minima of either sign, up to 0.01."""
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng([seed, n_out, n_in])
    data = random.integers(0, 256, (n_out, n_in // n_values, n_bytes), dtype=np.uint8)
    if kind == "Q8_0":
        data[data == 128] = 127  # -128 is no code that llama.cpp writes
    for at in HALVES.get(kind, ()):
        scales = random.uniform(-0.01, 0.01, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = random.integers(115, 125, data.shape[:2])  # powers of two
    if kind == "IQ1_M":  # the scale is spread over the upper four bits of four words
        data[..., 55] = data[..., 55] & 0x0F | 0x20
    return torch.from_numpy(data.reshape(n_out, -1))


class Numbers(NamedTuple):
    """What blocks hold: a weight is halves * factors * values + seconds * second_factors. All float32."""

    values: Floats  # [n_out, n_in]
    factors: Floats  # [n_out, n_in / group]
    halves: Floats  # [n_out, n_in / block]
    second_factors: Floats | None  # [n_out, n_in / group]: minima
    seconds: Floats | None  # [n_out, n_in / block]


def numbers(kind: str, data: Tensor, group: int) -> Numbers:
    """Found without knowing where codes lie: gguf reads the blocks with halves and factors of one and zero."""
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = data.numpy().reshape(data.shape[0], -1, n_bytes)  # [n_out, n_blocks, n_bytes]
    plain = blocks.copy()
    if kind in FACTORS_OF_ONE:
        start, ones = FACTORS_OF_ONE[kind]
        plain[..., start : start + len(ones)] = np.frombuffer(ones, np.uint8)
    values = _read(kind, _with_halves(kind, plain, 1.0, 0.0))
    scaled = _read(kind, _with_halves(kind, blocks, 1.0, 0.0)).reshape(len(blocks), -1, group)
    by_group = values.reshape(len(blocks), -1, group)
    largest = np.abs(by_group).argmax(2)[..., None]
    with np.errstate(invalid="ignore"):
        factors = np.take_along_axis(scaled, largest, 2) / np.take_along_axis(by_group, largest, 2)
    factors = np.nan_to_num(factors)[..., 0]  # of a group of zeros any factor does
    found = [_half(blocks, at) for at in HALVES.get(kind, ())] or [np.ones(blocks.shape[:2], np.float32)]
    if len(found) == 1:
        return Numbers(values, factors, found[0], None, None)
    minima = _read(kind, _with_halves(kind, blocks, 0.0, 1.0)).reshape(len(blocks), -1, group)
    sign = np.float32(-1 if n_values > 32 else 1)
    return Numbers(values, factors, found[0], np.ascontiguousarray(minima[..., 0]) * sign, found[1] * sign)


def _half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _with_halves(kind: str, blocks: Bytes, *halves: float) -> Bytes:
    changed = blocks.copy()
    for at, half in zip(HALVES.get(kind, ()), halves, strict=False):
        changed[..., at : at + 2] = np.array([half], np.float16).view(np.uint8)
    return changed


def _read(kind: str, blocks: Bytes) -> Floats:
    wide: Floats = gguf.quants.dequantize(blocks.reshape(len(blocks), -1), gguf.GGMLQuantizationType[kind])
    return wide
