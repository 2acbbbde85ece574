"""RMS norm on CPU: one compiled call, each row alone, so neither width nor threads can change a bit.

Values that the definition rounds are stored and read back, so one body serves float32 and bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.compiled import bfloat_pointer, float_pointer, inlined, kernel, shifted
from kernels.vector import WIDTH, fma, load_part, mul, splat, store_part, sum_lanes


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype in _NORM else "float32 and bfloat16 only"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    d_model = x.shape[-1]
    _NORM[x.dtype](x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // d_model, d_model, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


@inlined
def norm_row(x: Any, weight: Any, out: Any, d_model: int, eps: float) -> None:
    """One row: out = weight * round(x / sqrt(mean(x²) + eps)). Pointers of one kind; out may be x."""
    squares = splat(np.float32(0))
    for i in range(0, d_model, WIDTH):
        part = load_part(x, i, d_model - i)
        squares = fma(part, part, squares)
    mean = sum_lanes(squares) / np.float32(d_model)
    scale = splat(np.float32(np.float32(1) / np.sqrt(mean + np.float32(eps))))
    for i in range(0, d_model, WIDTH):
        n = d_model - i
        store_part(out, i, mul(load_part(x, i, n), scale), n)
        store_part(out, i, mul(load_part(out, i, n), load_part(weight, i, n)), n)


@kernel
def _norm_float(x: int, weight: int, out: int, n_rows: int, d_model: int, eps: float) -> None:
    for row in range(n_rows):
        norm_row(shifted(float_pointer(x), row * d_model), float_pointer(weight),
                 shifted(float_pointer(out), row * d_model), d_model, eps)


@kernel
def _norm_bfloat(x: int, weight: int, out: int, n_rows: int, d_model: int, eps: float) -> None:
    for row in range(n_rows):
        norm_row(shifted(bfloat_pointer(x), row * d_model), bfloat_pointer(weight),
                 shifted(bfloat_pointer(out), row * d_model), d_model, eps)


_NORM = {torch.float32: _norm_float, torch.bfloat16: _norm_bfloat}
