"""Proof of the norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.kernels.norm.op import add_rms_norm, rms_norm
from slipstream.kernels.proof.case import N_ROWS, Make, Rows
from slipstream.kernels.proof.inputs import Inputs


def of_norm(inputs: Inputs, d: int = 1000) -> Rows:
    """With weights of the rows' dtype and of float32."""
    x, residual = inputs.normal(N_ROWS, d), inputs.normal(N_ROWS, d)
    weight, wide = inputs.normal(d), inputs.normal(d, dtype=torch.float32)

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows = slice(first, first + n)
        return (*add_rms_norm(x[rows], residual[rows], weight, 1e-6), rms_norm(x[rows], wide, 1e-6))

    return Rows(compute)


CASES: Mapping[str, Make] = {
    "norms": of_norm,
}
