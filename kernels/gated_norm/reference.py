"""Definition of `gated_norm` in plain torch: float32 inside, float64 for float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    check(x, gate, weight, activation)
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    opened = F.silu(gate.to(wide)) if activation == "silu" else torch.sigmoid(gate.to(wide))
    return ((normed * weight.to(wide)).flatten(1) * opened).to(gate.dtype)


def check(x: Tensor, gate: Tensor, weight: Tensor, activation: str) -> None:
    """Raises ValueError for what does not fit."""
    n_rows, n_heads, d = x.shape
    if gate.dtype != x.dtype or gate.shape != (n_rows, n_heads * d) or activation not in ("silu", "sigmoid"):
        raise ValueError("gate is [n_rows, n_heads * d] of x's dtype, activation silu or sigmoid")
    if weight.shape != (d,):
        raise ValueError("weight is [d]")
