"""Proof of the gated activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from slipstream.kernels.gated.activation import GELU, SILU, Activation
from slipstream.kernels.gated.op import gated_mul, sigmoid_mul, soft_cap
from slipstream.kernels.proof.case import N_ROWS, Make, Rows
from slipstream.kernels.proof.inputs import Inputs

ACTIVATIONS = SILU, GELU, Activation("clamped", 1.0, 1.702), Activation("limited", 0.5)


def of_gated(inputs: Inputs, d: int = 333) -> Rows:
    """All of them; one gate for a whole row."""
    gate_up, x, gate = inputs.normal(N_ROWS, 2 * d), inputs.normal(N_ROWS, d), inputs.normal(N_ROWS, 1)

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows = slice(first, first + n)
        return (
            *(gated_mul(gate_up[rows], one) for one in ACTIVATIONS),
            sigmoid_mul(x[rows], gate[rows]),
            soft_cap(8 * x[rows], 5.0),
        )

    return Rows(compute)


CASES: Mapping[str, Make] = {
    "activations": of_gated,
}
