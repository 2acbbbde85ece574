"""Gates in Triton: one element is one element, so tiles change nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gated.activation import Activation
from slipstream.kernels.gated.reference import check_gate
from slipstream.kernels.triton_launch import FUSED, aligned, begin, early, power_of_two, tiles
from slipstream.kernels.triton_launch import refuses as refuses

TILE = 1024  # elements of a program
# gelu(x) = x / 2 (1 + tanh u) = x / (1 + exp(-2u)) with u = √(2/π) (x + 0.044715 x³)
GELU_LINEAR = tl.constexpr(1.5957691216057308)  # of 2u
GELU_CUBIC = tl.constexpr(0.07135481627260025)


def gated_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((n_rows, d_inner))
    if out.numel() > 0:
        grid, how = (n_rows, tiles(d_inner, TILE)), (d_inner, TILE, *activation)
        _gated[grid](aligned(gate_up), out, *how, num_warps=4, **early(out.device), **FUSED)
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    check_gate(x, gate)
    (n_rows, d), x = x.shape, aligned(x)
    out = torch.empty_like(x)
    if x.numel() > 0:
        size = min(TILE, power_of_two(d))  # one gate per head: rows are heads, and short
        _opened[n_rows, tiles(d, size)](x, aligned(gate), out, d, gate.shape[1], size, num_warps=4, **FUSED)
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    x = aligned(x)
    out = torch.empty_like(x)
    if x.numel() > 0:
        _capped[(tiles(x.numel(), TILE),)](x, out, x.numel(), cap, TILE, num_warps=4, **FUSED)
    return out


@triton.jit
def over_one_plus_exp(x, power):
    """x / (1 + exp(-power)): x * sigmoid(power), and where power is huge x or 0, never NaN."""
    return x / (1.0 + tl.exp(-power))


@triton.jit
def _gelu(x):
    """gelu in its tanh form."""
    return over_one_plus_exp(x, x * (GELU_LINEAR + GELU_CUBIC * (x * x)))


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr, STEEPNESS: tl.constexpr):
    gate = tl.where(gate > LIMIT, LIMIT, gate)  # unlike `tl.minimum` this leaves a NaN one
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return over_one_plus_exp(gate, STEEPNESS * gate) * (up + 1.0)


@triton.jit
def _limited(gate, up, LIMIT: tl.constexpr):
    """With `where` in place of these, experts in float32 spill on sm_120."""
    swish = tl.minimum(over_one_plus_exp(gate, gate), LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return swish * tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gated(gate, up, FORM: tl.constexpr, LIMIT: tl.constexpr, STEEPNESS: tl.constexpr):
    """`gated_mul` of tiles in float32; FORM, LIMIT and STEEPNESS are those of an `Activation`."""
    if FORM == "clamped":
        product = _clamped(gate, up, LIMIT, STEEPNESS)
    elif FORM == "limited":
        product = _limited(gate, up, LIMIT)
    elif FORM == "gelu":
        product = _gelu(gate) * up
    else:
        product = over_one_plus_exp(gate, gate) * up
    return product


@triton.jit
def _gated(
    gate_up_at,
    out_at,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    FORM: tl.constexpr,
    LIMIT: tl.constexpr,
    STEEPNESS: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = i < D
    gate = tl.load(gate_up_at + row * (2 * D) + i, mask=inside, other=0.0)  # [SIZE]
    up = tl.load(gate_up_at + row * (2 * D) + D + i, mask=inside, other=0.0)  # [SIZE]
    product = gated(gate.to(tl.float32), up.to(tl.float32), FORM, LIMIT, STEEPNESS)
    tl.store(out_at + row * D + i, product.to(gate.dtype), mask=inside)


@triton.jit
def _opened(x_at, gate_at, out_at, D: tl.constexpr, D_GATE: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = i < D
    x = tl.load(x_at + row * D + i, mask=inside, other=0.0)  # [SIZE]
    if D_GATE == 1:
        gate = tl.load(gate_at + row)  # one for all of them
    else:
        gate = tl.load(gate_at + row * D + i, mask=inside, other=0.0)  # [SIZE]
    opened = over_one_plus_exp(x.to(tl.float32), gate.to(tl.float32))
    tl.store(out_at + row * D + i, opened.to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=["n", "cap"])
def _capped(x_at, out_at, n, cap, SIZE: tl.constexpr):
    """tanh u = 2 / (1 + exp(-2u)) - 1."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_at + i, mask=i < n, other=0.0)  # [SIZE]
    tanh = over_one_plus_exp(2.0, 2.0 * (x.to(tl.float32) / cap)) - 1.0
    tl.store(out_at + i, (cap * tanh).to(x.dtype), mask=i < n)
