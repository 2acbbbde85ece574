"""RMS norm in Triton: one program a row, the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton_launch import FUSED, aligned, begin, early, power_of_two
from slipstream.kernels.triton_launch import refuses as refuses


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = aligned(x)
    out = torch.empty_like(x)
    _launch((x, x, x), weight, out, eps, added=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = aligned(x), aligned(residual)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError("x and residual are of one shape and dtype")
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch((x, residual, total), weight, out, eps, added=True)
    return out, total


def _launch(
    tensors: tuple[Tensor, Tensor, Tensor], weight: Tensor, out: Tensor, eps: float, *, added: bool
) -> None:
    """tensors: (x, residual, total); without a sum the last two are not touched."""
    x, d_model = tensors[0], tensors[0].shape[-1]
    if weight.shape != (d_model,) or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError("weight is [d_model] of x's dtype or float32")
    if x.numel() == 0:
        return
    size = power_of_two(d_model)
    _row[(x.numel() // d_model,)](
        *(*tensors, aligned(weight), out, eps, d_model, size, added),
        num_warps=warps(size),
        **early(x.device),
        **FUSED,
    )


def warps(size: int) -> int:
    """Warps of a program that holds a row of `size` elements: sixteen elements a thread, at most 32 warps' worth."""
    return min(max(size // 512, 1), 16)


@triton.jit
def inverse_rms(squares, d: tl.constexpr, eps, axis: tl.constexpr):
    """1 / sqrt(mean + eps) of a sum of d squares along `axis`, both divisions and the root rounded correctly."""
    mean = tl.div_rn(tl.sum(squares, axis), d * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _row(
    x_at,
    residual_at,
    total_at,
    weight_at,
    out_at,
    eps,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    ADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The kind of the weight says where its product is rounded, as in the reference."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    inside = i < D
    x = tl.load(x_at + row * D + i, mask=inside, other=0.0)  # [SIZE]
    if ADDED:
        residual = tl.load(residual_at + row * D + i, mask=inside, other=0.0)  # [SIZE]
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_at + row * D + i, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * inverse_rms(wide * wide, D, eps, 0)
    weight = tl.load(weight_at + i, mask=inside, other=0.0)  # [SIZE]
    scaled = normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_at + row * D + i, scaled.to(x.dtype), mask=inside)
