"""What stands between the two products of an expert, for implementations that make it of another op."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.gated.op import clamped_mul, gelu_mul, silu_mul
from slipstream.kernels.moe.types import Activation, Gelu


def activated(gate_up: Tensor, activation: Activation | None) -> Tensor:
    """[n_pairs, 2 * d_inner], gate first -> [n_pairs, d_inner]. activation: as in `pack_experts`."""
    if activation is None:
        return silu_mul(gate_up)
    if isinstance(activation, Gelu):
        return gelu_mul(gate_up)
    return clamped_mul(gate_up, activation.limit, activation.steepness)
