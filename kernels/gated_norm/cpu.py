"""Gated RMS norm on CPU: one compiled call, every head of every row by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import bfloat_pointer, float_pointer, inlined, kernel, shifted
from slipstream.kernels.norm.cpu import inverse_rms
from slipstream.kernels.vector import WIDTH, add, div, exp, load_part, mul, splat, store_part, sub


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype in _ROWS else "float32 and bfloat16 only"


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    n_rows, n_heads, d = x.shape
    if gate.dtype != x.dtype or gate.shape != (n_rows, n_heads * d) or activation not in ("silu", "sigmoid"):
        raise ValueError("gate is [n_rows, n_heads * d] of x's dtype, activation silu or sigmoid")
    if gate.stride(-1) != 1:
        gate = gate.contiguous()
    x, weight = x.contiguous(), weight.to(torch.float32).contiguous()
    out = torch.empty((n_rows, n_heads * d), dtype=gate.dtype)
    addresses = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), out.data_ptr()
    _ROWS[x.dtype](addresses, (n_rows, n_heads, d, gate.stride(0)), eps, int(activation == "silu"))
    return out


@inlined
def _all_rows(tensors: Any, weight: Any, shape: Any, eps: float, silu: int) -> None:
    """tensors: (x, gate, out). shape: (n_rows, n_heads, d, elements from row to row of gate)."""
    x, gate, out = tensors
    n_rows, n_heads, d, stride = shape
    one, zero = splat(np.float32(1)), splat(np.float32(0))
    for row in range(n_rows):
        for head in range(n_heads):
            start, gates = (row * n_heads + head) * d, shifted(gate, row * stride + head * d)
            scale = inverse_rms(shifted(x, start), d, eps)
            for i in range(0, d, WIDTH):
                n = d - i
                opening = load_part(gates, i, n)
                opened = div(opening if silu else one, add(one, exp(sub(zero, opening))))
                normed = mul(mul(load_part(x, start + i, n), scale), load_part(weight, i, n))
                store_part(out, start + i, mul(normed, opened), n)


@kernel
def _float_rows(addresses: Any, shape: Any, eps: float, silu: int) -> None:
    x, gate, weight, out = addresses
    tensors = float_pointer(x), float_pointer(gate), float_pointer(out)
    _all_rows(tensors, float_pointer(weight), shape, eps, silu)


@kernel
def _bfloat_rows(addresses: Any, shape: Any, eps: float, silu: int) -> None:
    x, gate, weight, out = addresses
    tensors = bfloat_pointer(x), bfloat_pointer(gate), bfloat_pointer(out)
    _all_rows(tensors, float_pointer(weight), shape, eps, silu)


_ROWS = {torch.float32: _float_rows, torch.bfloat16: _bfloat_rows}
