"""Gates on CPU with their own exp: torch's depends on where vectors end and on the number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import inlined, kernel, per_dtype, pointer, shifted
from slipstream.kernels.compiled import refuses as refuses
from slipstream.kernels.exponential import over_one_plus_exp
from slipstream.kernels.gated.activation import Activation
from slipstream.kernels.gated.reference import check_gate
from slipstream.kernels.row_kernel import RowKernel
from slipstream.kernels.vector import WIDTH, first_lane, fma, larger, load_part, smaller, splat, store_part

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)
# gelu(x) = x / 2 (1 + tanh u) = x / (1 + exp(-2u)) with u = √(2/π) (x + 0.044715 x³)
GELU_LINEAR, GELU_CUBIC = np.float32(1.5957691216057308), np.float32(0.07135481627260025)  # of 2u


def gated_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    gate_up = gate_up.contiguous()
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, d_inner), dtype=gate_up.dtype)
    form, limit, steepness = activation
    work = _gated[gate_up.dtype, form]
    work(gate_up.data_ptr(), out.data_ptr(), d_inner, limit, steepness, (0, n_rows))
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
def _silu(gate: Any, up: Any) -> Any:
    return over_one_plus_exp(gate, gate) * up


@inlined
def _gelu(gate: Any, up: Any) -> Any:
    power = gate * fma(splat(GELU_CUBIC), gate * gate, splat(GELU_LINEAR))
    return over_one_plus_exp(gate, power) * up


@inlined
def _clamped(gate: Any, up: Any, limit: Any, steepness: Any) -> Any:
    most, least = splat(np.float32(limit)), splat(np.float32(-limit))
    gate = smaller(most, gate)  # a NaN stays one: it is what comes second
    up = smaller(most, larger(least, up))
    return over_one_plus_exp(gate, splat(np.float32(steepness)) * gate) * (up + splat(np.float32(1)))


@inlined
def _limited(gate: Any, up: Any, limit: Any) -> Any:
    most, least = splat(np.float32(limit)), splat(np.float32(-limit))
    swish = smaller(most, over_one_plus_exp(gate, gate))  # a NaN stays one, as above
    return swish * smaller(most, larger(least, up))


@per_dtype
def _gated(kind: Any, form: str) -> Any:
    @RowKernel
    def gated(gate_up: int, out: int, d_inner: int, limit: float, steepness: float, span: Any) -> None:
        for row in range(span[0], span[1]):
            gates = shifted(pointer(gate_up, kind), 2 * row * d_inner)
            ups, target = shifted(gates, d_inner), shifted(pointer(out, kind), row * d_inner)
            for i in range(0, d_inner, WIDTH):
                n = d_inner - i
                gate, up = load_part(gates, i, n), load_part(ups, i, n)
                if form == "silu":  # decided as the kernel is compiled
                    product = _silu(gate, up)
                elif form == "gelu":
                    product = _gelu(gate, up)
                elif form == "clamped":
                    product = _clamped(gate, up, limit, steepness)
                else:
                    product = _limited(gate, up, limit)
                store_part(target, i, product, n)

    return gated


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
