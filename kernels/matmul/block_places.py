"""Where a GGUF block has its codes and its groups' bytes: an expression for each type.

They are compiled for CPUs (`records.py`), and read whole tensors for CUDA (`block_numbers.py`). What the bytes mean
is what `gguf.quants` (llama.cpp's package) makes of them. b: the block's bytes; g: a group; an input is
32 c + 16 h + i, i below 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.kernels.matmul.formats import FP8, INT4, INT8

Code = Callable[[Any, Any, Any, Any], Any]
Factor = Callable[[Any, Any], Any]

CODES: Mapping[str, Code] = {
    "Q4_0": lambda b, c, h, i: b[2 + i] >> h * 4 & 15,
    "Q4_1": lambda b, c, h, i: b[4 + i] >> h * 4 & 15,
    "Q5_0": lambda b, c, h, i: b[6 + i] >> h * 4 & 15 | (b[2 + h * 2 + i // 8] >> i % 8 & 1) << 4,
    "Q5_1": lambda b, c, h, i: b[8 + i] >> h * 4 & 15 | (b[4 + h * 2 + i // 8] >> i % 8 & 1) << 4,
    "Q8_0": lambda b, c, h, i: b[2 + h * 16 + i] ^ 128,
    "Q2_K": lambda b, c, h, i: b[16 + c // 4 * 32 + h * 16 + i] >> c % 4 * 2 & 3,
    "Q3_K": lambda b, c, h, i: (
        b[32 + c // 4 * 32 + h * 16 + i] >> c % 4 * 2 & 3 | (b[h * 16 + i] >> c & 1) << 2
    ),
    "Q4_K": lambda b, c, h, i: b[16 + c // 2 * 32 + h * 16 + i] >> c % 2 * 4 & 15,
    "Q5_K": lambda b, c, h, i: (
        b[48 + c // 2 * 32 + h * 16 + i] >> c % 2 * 4 & 15 | (b[16 + h * 16 + i] >> c & 1) << 4
    ),
    "Q6_K": lambda b, c, h, i: (
        b[c // 4 * 64 + c % 2 * 32 + h * 16 + i] >> c % 4 // 2 * 4 & 15
        | (b[128 + c // 4 * 32 + h * 16 + i] >> c % 4 * 2 & 3) << 4
    ),
    "IQ4_NL": lambda b, c, h, i: b[2 + i] >> h * 4 & 15,
    "IQ4_XS": lambda b, c, h, i: b[8 + c * 16 + i] >> h * 4 & 15,
    "MXFP4": lambda b, c, h, i: b[1 + i] >> h * 4 & 15,
    **dict.fromkeys(INT4.values(), lambda b, c, h, i: b[16 * c + 8 * h + i // 2] >> i % 2 * 4 & 15),
    **dict.fromkeys(FP8.values(), lambda b, c, h, i: b[32 * c + 16 * h + i]),
    **dict.fromkeys(INT8.values(), lambda b, c, h, i: b[32 * c + 16 * h + i] ^ 128),
}
FACTORS: Mapping[str, Factor] = {
    "Q2_K": lambda b, g: b[g] & 15,
    "Q3_K": lambda b, g: (
        (b[96 + g % 8] >> (g // 8 * 4) & 15 | (b[104 + g % 4] >> (g // 4 * 2) & 3) << 4) - 32
    ),
    "Q4_K": lambda b, g: b[4 + g] & 63 if g < 4 else b[8 + g] & 15 | b[g] >> 6 << 4,
    "Q5_K": lambda b, g: b[4 + g] & 63 if g < 4 else b[8 + g] & 15 | b[g] >> 6 << 4,
    "Q6_K": lambda b, g: (b[192 + g] ^ 128) - 128,
    "IQ4_XS": lambda b, g: (b[4 + g // 2] >> (g % 2 * 4) & 15 | (b[2 + g // 4] >> (g % 4 * 2) & 3) << 4) - 32,
    "MXFP4": lambda b, g: b[0],
}
MINIMA: Mapping[str, Factor] = {
    "Q2_K": lambda b, g: b[g] >> 4,
    "Q4_K": lambda b, g: b[8 + g] & 63 if g < 4 else b[8 + g] >> 4 | b[4 + g] >> 6 << 4,
    "Q5_K": lambda b, g: b[8 + g] & 63 if g < 4 else b[8 + g] >> 4 | b[4 + g] >> 6 << 4,
}
