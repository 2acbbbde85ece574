"""Gates on CPU with their own exp: torch's depends on where vectors end and on the number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import inlined, kernel, per_dtype, pointer, shifted
from slipstream.kernels.compiled import refuses as refuses
from slipstream.kernels.exponential import over_one_plus_exp
from slipstream.kernels.gated.reference import check_gate
from slipstream.kernels.row_kernel import RowKernel
from slipstream.kernels.vector import WIDTH, first_lane, fma, larger, load_part, smaller, splat, store_part

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)
# gelu(x) = x / 2 (1 + tanh u) = x / (1 + exp(-2u)) with u = √(2/π) (x + 0.044715 x³)
GELU_LINEAR, GELU_CUBIC = np.float32(1.5957691216057308), np.float32(0.07135481627260025)  # of 2u


def silu_mul(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, d_inner), dtype=gate_up.dtype)
    _silu[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), d_inner, (0, n_rows))
    return out


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, d_inner), dtype=gate_up.dtype)
    _gelu[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), d_inner, (0, n_rows))
    return out


def clamped_mul(gate_up: Tensor, limit: float, steepness: float) -> Tensor:
    gate_up = gate_up.contiguous()
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, d_inner), dtype=gate_up.dtype)
    _clamped[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), d_inner, (limit, steepness), (0, n_rows))
    return out


def limited_mul(gate_up: Tensor, limit: float) -> Tensor:
    gate_up = gate_up.contiguous()
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, d_inner), dtype=gate_up.dtype)
    _limited[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), d_inner, limit, (0, n_rows))
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    check_gate(x, gate)
    x, gate = x.contiguous(), gate.contiguous()
    out = torch.empty_like(x)
    n_rows, d = x.shape
    _sigmoid[x.dtype](x.data_ptr(), gate.data_ptr(), out.data_ptr(), (d, gate.shape[1]), (0, n_rows))
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _capped[x.dtype](x.data_ptr(), out.data_ptr(), x.numel(), cap)
    return out


@inlined
def _pair(gate_up: Any, out: Any, row: int, d_inner: int) -> Any:
    """Where the gates, the ups and the results of a row begin."""
    gates = shifted(gate_up, 2 * row * d_inner)
    return gates, shifted(gates, d_inner), shifted(out, row * d_inner)


@per_dtype
def _silu(kind: Any) -> Any:
    @RowKernel
    def silu(gate_up: int, out: int, d_inner: int, span: Any) -> None:
        for row in range(span[0], span[1]):
            gates, ups, target = _pair(pointer(gate_up, kind), pointer(out, kind), row, d_inner)
            for i in range(0, d_inner, WIDTH):
                n = d_inner - i
                gate = load_part(gates, i, n)
                store_part(target, i, over_one_plus_exp(gate, gate) * load_part(ups, i, n), n)

    return silu


@per_dtype
def _gelu(kind: Any) -> Any:
    @RowKernel
    def gelu(gate_up: int, out: int, d_inner: int, span: Any) -> None:
        for row in range(span[0], span[1]):
            gates, ups, target = _pair(pointer(gate_up, kind), pointer(out, kind), row, d_inner)
            for i in range(0, d_inner, WIDTH):
                n = d_inner - i
                gate = load_part(gates, i, n)
                power = gate * fma(splat(GELU_CUBIC), gate * gate, splat(GELU_LINEAR))
                store_part(target, i, over_one_plus_exp(gate, power) * load_part(ups, i, n), n)

    return gelu


@per_dtype
def _clamped(kind: Any) -> Any:
    @RowKernel
    def clamped(gate_up: int, out: int, d_inner: int, form: Any, span: Any) -> None:
        """form: (limit, steepness)."""
        limit, steepness = form
        most, least = splat(np.float32(limit)), splat(np.float32(-limit))
        for row in range(span[0], span[1]):
            gates, ups, target = _pair(pointer(gate_up, kind), pointer(out, kind), row, d_inner)
            for i in range(0, d_inner, WIDTH):
                n = d_inner - i
                gate = smaller(most, load_part(gates, i, n))  # a NaN stays one: it is what comes second
                up = smaller(most, larger(least, load_part(ups, i, n)))
                swish = over_one_plus_exp(gate, splat(np.float32(steepness)) * gate)
                store_part(target, i, swish * (up + splat(np.float32(1))), n)

    return clamped


@per_dtype
def _limited(kind: Any) -> Any:
    @RowKernel
    def limited(gate_up: int, out: int, d_inner: int, limit: float, span: Any) -> None:
        most, least = splat(np.float32(limit)), splat(np.float32(-limit))
        for row in range(span[0], span[1]):
            gates, ups, target = _pair(pointer(gate_up, kind), pointer(out, kind), row, d_inner)
            for i in range(0, d_inner, WIDTH):
                n = d_inner - i
                gate = load_part(gates, i, n)
                swish = smaller(most, over_one_plus_exp(gate, gate))  # a NaN stays one, as above
                up = smaller(most, larger(least, load_part(ups, i, n)))
                store_part(target, i, swish * up, n)

    return limited


@per_dtype
def _sigmoid(kind: Any) -> Any:
    @RowKernel
    def sigmoid(x: int, gate: int, out: int, widths: Any, span: Any) -> None:
        """widths: (d, d of the gate)."""
        d, d_gate = widths
        for row in range(span[0], span[1]):
            source, target = shifted(pointer(x, kind), row * d), shifted(pointer(out, kind), row * d)
            gates = shifted(pointer(gate, kind), row * d_gate)
            shared = splat(first_lane(load_part(gates, 0, 1)))
            for i in range(0, d, WIDTH):
                n = d - i
                power = shared if d_gate == 1 else load_part(gates, i, n)
                store_part(target, i, over_one_plus_exp(load_part(source, i, n), power), n)

    return sigmoid


@per_dtype
def _capped(kind: Any) -> Any:
    @kernel
    def capped(x: int, out: int, n: int, cap: float) -> None:
        """tanh u = 2 / (1 + exp(-2u)) - 1."""
        source, target = pointer(x, kind), pointer(out, kind)
        whole, one, two = splat(np.float32(cap)), splat(np.float32(1)), splat(np.float32(2))
        for i in range(0, n, WIDTH):
            u = load_part(source, i, n - i) / whole
            store_part(target, i, whole * (over_one_plus_exp(two, two * u) - one), n - i)

    return capped
