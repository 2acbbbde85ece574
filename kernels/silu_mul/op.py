"""The gated activation between the two linear layers of a feed-forward block."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import op


@op("cpu", "reference")
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in float32, rounded once.

    gate_up: [n_rows, 2 * d_inner], gate first. Returns [n_rows, d_inner], the same dtype.
    """
    raise NotImplementedError
