"""Definition of `gated` in plain torch: float32 inside, float64 for float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def clamped_mul(gate_up: Tensor, limit: float, steepness: float) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(steepness * gate)).to(gate_up.dtype)


def limited_mul(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, -1)
    return (F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(gate_up.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    check_gate(x, gate)
    return (_wide(x) * torch.sigmoid(_wide(gate))).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return (cap * torch.tanh(_wide(x) / cap)).to(x.dtype)


def check_gate(x: Tensor, gate: Tensor) -> None:
    """Raises ValueError for a gate that is neither one per element nor one per row of x."""
    if gate.dtype != x.dtype or gate.shape not in (x.shape, (x.shape[0], 1)):
        raise ValueError(f"a gate of {gate.dtype} {[*gate.shape]} does not fit {x.dtype} {[*x.shape]}")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
