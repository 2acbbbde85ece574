"""Random matrices in GGUF's block types: every code at random, halves that are scales near one size."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

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


def block_bytes(kind: str, n_out: int, n_in: int, seed: int = 0) -> Tensor:
    """[n_out, n_in / block * bytes of a block] uint8: any codes; scales and minima of either sign, up to 0.01."""
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng([seed, n_out, n_in])
    data = random.integers(0, 256, (n_out, n_in // n_values, n_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, ()):
        scales = random.uniform(-0.01, 0.01, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = random.integers(115, 125, data.shape[:2])  # powers of two
    if kind == "IQ1_M":  # the scale is spread over the upper four bits of four words
        data[..., 55] = data[..., 55] & 0x0F | 0x20
    return torch.from_numpy(data.reshape(n_out, -1))
