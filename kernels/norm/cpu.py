"""RMS norm on CPU: one compiled call, each row alone, so neither width nor threads can change a bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import inlined, per_dtype, pointer, shifted
from slipstream.kernels.compiled import refuses as refuses
from slipstream.kernels.row_kernel import RowKernel
from slipstream.kernels.vector import WIDTH, fma, load_part, rounded, splat, store_part, sum_lanes

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    d_model = x.shape[-1]
    addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    _rows[x.dtype, weight.dtype](addresses, d_model, eps, (0, x.numel() // d_model))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    addresses = x.data_ptr(), residual.data_ptr(), total.data_ptr(), weight.data_ptr(), out.data_ptr()
    d_model = x.shape[-1]
    _added_rows[x.dtype, weight.dtype](addresses, d_model, eps, (0, x.numel() // d_model))
    return out, total


@inlined
def inverse_rms(x: Any, d: int, eps: float) -> Any:
    """1 / sqrt(mean(x²) + eps) of d elements, in all lanes."""
    squares = splat(np.float32(0))
    for i in range(0, d, WIDTH):
        part = load_part(x, i, d - i)
        squares = fma(part, part, squares)
    mean = sum_lanes(squares) / np.float32(d)
    return splat(np.float32(np.float32(1) / np.sqrt(mean + np.float32(eps))))


@inlined
def _row(x: Any, weight: Any, out: Any, d_model: int, eps: float) -> None:
    """The kind of `weight` decides: rounded to it before the product, which for float32 is not rounded at all."""
    scale = inverse_rms(x, d_model, eps)
    for i in range(0, d_model, WIDTH):
        n = d_model - i
        normed = rounded(load_part(x, i, n) * scale, weight)
        store_part(out, i, normed * load_part(weight, i, n), n)


@per_dtype
def _rows(kind: Any, scale_kind: Any) -> Any:
    @RowKernel
    def rows(addresses: Any, d_model: int, eps: float, span: Any) -> None:
        x, out = pointer(addresses[0], kind), pointer(addresses[2], kind)
        weight = pointer(addresses[1], scale_kind)
        for row in range(span[0], span[1]):
            start = row * d_model
            _row(shifted(x, start), weight, shifted(out, start), d_model, eps)

    return rows


@per_dtype
def _added_rows(kind: Any, scale_kind: Any) -> Any:
    @RowKernel
    def added_rows(addresses: Any, d_model: int, eps: float, span: Any) -> None:
        """addresses: of x, residual, total, weight and out; total = x + residual is written, then normed."""
        x, residual = pointer(addresses[0], kind), pointer(addresses[1], kind)
        total, out = pointer(addresses[2], kind), pointer(addresses[4], kind)
        weight = pointer(addresses[3], scale_kind)
        for row in range(span[0], span[1]):
            start = row * d_model
            for i in range(start, start + d_model, WIDTH):
                n = start + d_model - i
                store_part(total, i, load_part(x, i, n) + load_part(residual, i, n), n)
            _row(shifted(total, start), weight, shifted(out, start), d_model, eps)

    return added_rows
