"""Proof of the gated norm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from slipstream.kernels.gated_norm.op import gated_norm
from slipstream.kernels.proof.case import N_ROWS, Make, Rows
from slipstream.kernels.proof.inputs import Inputs


def of_gated_norm(inputs: Inputs, activation: str = "silu", n_heads: int = 6, d: int = 128) -> Rows:
    x, weight = inputs.normal(N_ROWS, n_heads, d), inputs.normal(d)
    gate = inputs.normal(N_ROWS, n_heads * d)

    return Rows(
        lambda first, n: (
            gated_norm(x[first : first + n], gate[first : first + n], weight, 1e-6, activation),
        )
    )


CASES: Mapping[str, Make] = {
    "silu": of_gated_norm,
    "sigmoid": partial(of_gated_norm, activation="sigmoid"),
}
