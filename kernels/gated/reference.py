"""Definition of `gated` in plain torch: float32 inside, float64 for float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.gated.activation import Activation


def gated_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, -1)
    return _gated(gate, up, activation).to(gate_up.dtype)


def _gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    form, limit, steepness = activation
    if form == "silu":
        return F.silu(gate) * up
    if form == "gelu":
        return F.gelu(gate, approximate="tanh") * up
    up = up.clamp(-limit, limit)
    if form == "limited":
        return F.silu(gate).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    return (up + 1) * gate * torch.sigmoid(steepness * gate)


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
