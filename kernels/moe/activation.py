"""What stands between the two products of an expert, for implementations that make it of another op."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.gated.op import clamped_mul, silu_mul
from slipstream.kernels.moe.types import Clamped


def activated(gate_up: Tensor, clamped: Clamped | None) -> Tensor:
    """[n_pairs, 2 * d_inner], gate first -> [n_pairs, d_inner]. clamped: as in `pack_experts`."""
    if clamped is None:
        return silu_mul(gate_up)
    return clamped_mul(gate_up, clamped.limit, clamped.steepness)
