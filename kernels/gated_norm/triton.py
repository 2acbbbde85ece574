"""Gated RMS norm in Triton: a program has a few heads of one row, and every head is a sum of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gated.triton import over_one_plus_exp
from slipstream.kernels.gated_norm.reference import check
from slipstream.kernels.norm.triton import inverse_rms
from slipstream.kernels.triton_launch import ALIGNMENT, FUSED, aligned, begin, early, power_of_two, tiles
from slipstream.kernels.triton_launch import refuses as refuses

HEADS = 4  # of a program


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    n_rows, n_heads, d = x.shape
    check(x, gate, weight, activation)
    if gate.stride(-1) != 1 or gate.data_ptr() % ALIGNMENT:
        gate = gate.contiguous().clone()
    out = torch.empty((n_rows, n_heads * d), dtype=gate.dtype, device=x.device)
    if out.numel() > 0:
        _heads[n_rows, tiles(n_heads, HEADS)](
            *(aligned(x), gate, aligned(weight), out, eps),
            *(gate.stride(0), n_heads, d, power_of_two(d), HEADS, activation == "silu"),
            num_warps=4,
            **early(x.device),
            **FUSED,
        )
    return out


@triton.jit
def _heads(
    x_at,
    gate_at,
    weight_at,
    out_at,
    eps,
    STRIDE: tl.constexpr,
    N_HEADS: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """STRIDE: elements from row to row of the gate."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, SIZE)
    place = head[:, None] * D + i[None, :]  # [HEADS, SIZE]
    inside = (head[:, None] < N_HEADS) & (i[None, :] < D)
    x = tl.load(x_at + row * (N_HEADS * D) + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_at + row * STRIDE + place, mask=inside, other=0.0)
    weight = tl.load(weight_at + i, mask=i < D, other=0.0).to(tl.float32)  # [SIZE]
    normed = x * inverse_rms(x * x, D, eps, 1)[:, None] * weight[None, :]
    wide = gate.to(tl.float32)
    opened = over_one_plus_exp(wide if SILU else 1.0, wide)
    tl.store(out_at + row * (N_HEADS * D) + place, (normed * opened).to(gate.dtype), mask=inside)
