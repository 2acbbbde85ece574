"""Gates on CPU with their own exp: torch's depends on where vectors end and on the number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import bfloat_pointer, float_pointer, inlined, kernel, shifted
from slipstream.kernels.gated.reference import check_gate
from slipstream.kernels.vector import (
    WIDTH,
    add,
    div,
    exp,
    first_lane,
    fma,
    larger,
    load_part,
    mul,
    smaller,
    splat,
    store_part,
    sub,
)

# gelu(x) = x / 2 (1 + tanh u) = x / (1 + exp(-2u)) with u = √(2/π) (x + 0.044715 x³)
GELU_LINEAR, GELU_CUBIC = np.float32(1.5957691216057308), np.float32(0.07135481627260025)  # of 2u


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype in _SILU else "float32 and bfloat16 only"


def silu_mul(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, d_inner), dtype=gate_up.dtype)
    _SILU[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), n_rows, d_inner)
    return out


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, d_inner), dtype=gate_up.dtype)
    _GELU[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), n_rows, d_inner)
    return out


def clamped_mul(gate_up: Tensor, limit: float, steepness: float) -> Tensor:
    gate_up = gate_up.contiguous()
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, d_inner), dtype=gate_up.dtype)
    _CLAMPED[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), (n_rows, d_inner), (limit, steepness))
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    check_gate(x, gate)
    x, gate = x.contiguous(), gate.contiguous()
    out = torch.empty_like(x)
    _SIGMOID[x.dtype](x.data_ptr(), gate.data_ptr(), out.data_ptr(), (*x.shape, gate.shape[1]))
    return out


@inlined
def _over_one_plus_exp(x: Any, power: Any) -> Any:
    """x / (1 + exp(-power)). Below -88, where `exp` stops growing, less than 1e-36 of x is left."""
    return div(x, add(splat(np.float32(1)), exp(sub(splat(np.float32(0)), power))))


@inlined
def _silu_rows(gate_up: Any, out: Any, n_rows: int, d_inner: int) -> None:
    for row in range(n_rows):
        gates = shifted(gate_up, 2 * row * d_inner)
        ups, target = shifted(gates, d_inner), shifted(out, row * d_inner)
        for i in range(0, d_inner, WIDTH):
            n = d_inner - i
            gate = load_part(gates, i, n)
            store_part(target, i, mul(_over_one_plus_exp(gate, gate), load_part(ups, i, n)), n)


@inlined
def _gelu_rows(gate_up: Any, out: Any, n_rows: int, d_inner: int) -> None:
    for row in range(n_rows):
        gates = shifted(gate_up, 2 * row * d_inner)
        ups, target = shifted(gates, d_inner), shifted(out, row * d_inner)
        for i in range(0, d_inner, WIDTH):
            n = d_inner - i
            gate = load_part(gates, i, n)
            power = mul(gate, fma(splat(GELU_CUBIC), mul(gate, gate), splat(GELU_LINEAR)))
            store_part(target, i, mul(_over_one_plus_exp(gate, power), load_part(ups, i, n)), n)


@inlined
def _clamped_rows(gate_up: Any, out: Any, shape: Any, how: Any) -> None:
    """shape: (n_rows, d_inner). how: (limit, steepness)."""
    n_rows, d_inner = shape
    most, least = splat(np.float32(how[0])), splat(np.float32(-how[0]))
    for row in range(n_rows):
        gates = shifted(gate_up, 2 * row * d_inner)
        ups, target = shifted(gates, d_inner), shifted(out, row * d_inner)
        for i in range(0, d_inner, WIDTH):
            n = d_inner - i
            gate = smaller(most, load_part(gates, i, n))  # a NaN stays one: it is what comes second
            up = smaller(most, larger(least, load_part(ups, i, n)))
            swish = _over_one_plus_exp(gate, mul(splat(np.float32(how[1])), gate))
            store_part(target, i, mul(swish, add(up, splat(np.float32(1)))), n)


@inlined
def _sigmoid_rows(x: Any, gate: Any, out: Any, shape: Any) -> None:
    """shape: (n_rows, d, d of the gate)."""
    n_rows, d, d_gate = shape
    for row in range(n_rows):
        source, target = shifted(x, row * d), shifted(out, row * d)
        gates = shifted(gate, row * d_gate)
        shared = splat(first_lane(load_part(gates, 0, 1)))
        for i in range(0, d, WIDTH):
            n = d - i
            power = shared if d_gate == 1 else load_part(gates, i, n)
            store_part(target, i, _over_one_plus_exp(load_part(source, i, n), power), n)


@kernel
def _silu_float(gate_up: int, out: int, n_rows: int, d_inner: int) -> None:
    _silu_rows(float_pointer(gate_up), float_pointer(out), n_rows, d_inner)


@kernel
def _silu_bfloat(gate_up: int, out: int, n_rows: int, d_inner: int) -> None:
    _silu_rows(bfloat_pointer(gate_up), bfloat_pointer(out), n_rows, d_inner)


@kernel
def _gelu_float(gate_up: int, out: int, n_rows: int, d_inner: int) -> None:
    _gelu_rows(float_pointer(gate_up), float_pointer(out), n_rows, d_inner)


@kernel
def _gelu_bfloat(gate_up: int, out: int, n_rows: int, d_inner: int) -> None:
    _gelu_rows(bfloat_pointer(gate_up), bfloat_pointer(out), n_rows, d_inner)


@kernel
def _clamped_float(gate_up: int, out: int, shape: Any, how: Any) -> None:
    _clamped_rows(float_pointer(gate_up), float_pointer(out), shape, how)


@kernel
def _clamped_bfloat(gate_up: int, out: int, shape: Any, how: Any) -> None:
    _clamped_rows(bfloat_pointer(gate_up), bfloat_pointer(out), shape, how)


@kernel
def _sigmoid_float(x: int, gate: int, out: int, shape: Any) -> None:
    _sigmoid_rows(float_pointer(x), float_pointer(gate), float_pointer(out), shape)


@kernel
def _sigmoid_bfloat(x: int, gate: int, out: int, shape: Any) -> None:
    _sigmoid_rows(bfloat_pointer(x), bfloat_pointer(gate), bfloat_pointer(out), shape)


_SILU = {torch.float32: _silu_float, torch.bfloat16: _silu_bfloat}
_GELU = {torch.float32: _gelu_float, torch.bfloat16: _gelu_bfloat}
_CLAMPED = {torch.float32: _clamped_float, torch.bfloat16: _clamped_bfloat}
_SIGMOID = {torch.float32: _sigmoid_float, torch.bfloat16: _sigmoid_bfloat}
