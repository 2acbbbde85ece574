"""RMS norm on CPU: one compiled call, each row alone, so neither width nor threads can change a bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import bfloat_pointer, float_pointer, inlined, kernel, shifted
from slipstream.kernels.vector import WIDTH, add, fma, load_part, mul, rounded, splat, store_part, sum_lanes


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if (dtype, dtype) in _ROWS else "float32 and bfloat16 only"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    d_model = x.shape[-1]
    rows = _ROWS[x.dtype, weight.dtype]
    rows((x.data_ptr(), weight.data_ptr(), out.data_ptr()), x.numel() // d_model, d_model, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    addresses = x.data_ptr(), residual.data_ptr(), total.data_ptr(), weight.data_ptr(), out.data_ptr()
    d_model = x.shape[-1]
    _ADDED_ROWS[x.dtype, weight.dtype](addresses, x.numel() // d_model, d_model, eps)
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
        normed = rounded(mul(load_part(x, i, n), scale), weight)
        store_part(out, i, mul(normed, load_part(weight, i, n)), n)


@inlined
def _rows(x: Any, weight: Any, out: Any, n_rows: int, d_model: int, eps: float) -> None:
    for row in range(n_rows):
        start = row * d_model
        _row(shifted(x, start), weight, shifted(out, start), d_model, eps)


@inlined
def _added_rows(pairs: Any, weight: Any, out: Any, n_rows: int, d_model: int, eps: float) -> None:
    """pairs: pointers (x, residual, total); total = x + residual is written, then normed."""
    x, residual, total = pairs
    for row in range(n_rows):
        start = row * d_model
        for i in range(0, d_model, WIDTH):
            n = d_model - i
            store_part(
                total, start + i, add(load_part(x, start + i, n), load_part(residual, start + i, n)), n
            )
        _row(shifted(total, start), weight, shifted(out, start), d_model, eps)


@kernel
def _float_rows(addresses: Any, n_rows: int, d_model: int, eps: float) -> None:
    x, weight, out = addresses
    _rows(float_pointer(x), float_pointer(weight), float_pointer(out), n_rows, d_model, eps)


@kernel
def _bfloat_rows(addresses: Any, n_rows: int, d_model: int, eps: float) -> None:
    x, weight, out = addresses
    _rows(bfloat_pointer(x), bfloat_pointer(weight), bfloat_pointer(out), n_rows, d_model, eps)


@kernel
def _bfloat_rows_float_scale(addresses: Any, n_rows: int, d_model: int, eps: float) -> None:
    x, weight, out = addresses
    _rows(bfloat_pointer(x), float_pointer(weight), bfloat_pointer(out), n_rows, d_model, eps)


@kernel
def _added_float_rows(addresses: Any, n_rows: int, d_model: int, eps: float) -> None:
    x, residual, total, weight, out = addresses
    pairs = float_pointer(x), float_pointer(residual), float_pointer(total)
    _added_rows(pairs, float_pointer(weight), float_pointer(out), n_rows, d_model, eps)


@kernel
def _added_bfloat_rows(addresses: Any, n_rows: int, d_model: int, eps: float) -> None:
    x, residual, total, weight, out = addresses
    pairs = bfloat_pointer(x), bfloat_pointer(residual), bfloat_pointer(total)
    _added_rows(pairs, bfloat_pointer(weight), bfloat_pointer(out), n_rows, d_model, eps)


@kernel
def _added_bfloat_rows_float_scale(addresses: Any, n_rows: int, d_model: int, eps: float) -> None:
    x, residual, total, weight, out = addresses
    pairs = bfloat_pointer(x), bfloat_pointer(residual), bfloat_pointer(total)
    _added_rows(pairs, float_pointer(weight), bfloat_pointer(out), n_rows, d_model, eps)


# By dtype of the rows and of the scale.
_ROWS = {
    (torch.float32, torch.float32): _float_rows,
    (torch.bfloat16, torch.bfloat16): _bfloat_rows,
    (torch.bfloat16, torch.float32): _bfloat_rows_float_scale,
}
_ADDED_ROWS = {
    (torch.float32, torch.float32): _added_float_rows,
    (torch.bfloat16, torch.bfloat16): _added_bfloat_rows,
    (torch.bfloat16, torch.float32): _added_bfloat_rows_float_scale,
}
