"""The op of an activation that is known as data."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.gated.kinds import Activation, Gelu, Limited
from slipstream.kernels.gated.op import clamped_mul, gelu_mul, limited_mul, silu_mul


def activated(gate_up: Tensor, activation: Activation | None) -> Tensor:
    """[n_rows, 2 * d_inner], gate first -> [n_rows, d_inner]. activation: None for silu(gate) * up."""
    if activation is None:
        return silu_mul(gate_up)
    if isinstance(activation, Gelu):
        return gelu_mul(gate_up)
    if isinstance(activation, Limited):
        return limited_mul(gate_up, activation.limit)
    return clamped_mul(gate_up, activation.limit, activation.steepness)
