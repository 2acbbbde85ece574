"""Linear layers in tiles of 16 rows, where oneDNN cannot prepack: all calls have one shape, so rows agree."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.matmul.packed import Packed
from slipstream.kernels.matmul.quantized import Quantized, widened
from slipstream.kernels.matmul.reference import PlainWeight
from slipstream.kernels.matmul.reference import take_rows as take_rows

TILE = 16


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype in (torch.float32, torch.bfloat16) else "float32 and bfloat16 only"


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    return PlainWeight(widened(weight), bias)


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    if not isinstance(packed, PlainWeight):
        raise TypeError(f"tiled linear got a {type(packed).__name__}; pack the weight with tiled too")
    n_rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -n_rows % TILE))
    tiles = [F.linear(tile, packed.weight, packed.bias) for tile in torch.split(padded, TILE)]
    return torch.cat(tiles)[:n_rows].to(out_dtype or x.dtype)
