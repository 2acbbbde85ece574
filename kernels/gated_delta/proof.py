"""Proof of the gated delta rule, with a decay per head and per key dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.gated_delta.op import DeltaGate, DeltaState, gated_delta, settle
from slipstream.kernels.proof.case import N_ROWS, Make, Passes
from slipstream.kernels.proof.inputs import Inputs
from slipstream.kernels.proof.updates import N_PARKED, N_SLOTS, SLOT, fed

_WIDE = torch.float32


def of_gated_delta(
    inputs: Inputs, *, per_key: bool = False, heads: tuple[int, int, int] = (2, 4, 64)
) -> Passes:
    """heads: key heads, value heads, dimension of both."""
    n_key, n_value, d = heads
    decays = (n_value, d) if per_key else (n_value,)
    mixed = inputs.normal(N_ROWS, (2 * n_key + n_value) * d)
    decay, beta = inputs.normal(N_ROWS, *decays), inputs.normal(N_ROWS, n_value)
    gate = DeltaGate(inputs.normal(n_value, dtype=_WIDE), inputs.normal(*decays, dtype=_WIDE))

    def feed(lengths: Sequence[int], *, beside: bool, parks: bool = False) -> Sequence[Tensor]:
        state = DeltaState(
            inputs.zeros(N_SLOTS, n_value, d, d, dtype=_WIDE),
            inputs.zeros(N_PARKED, n_key, d, dtype=_WIDE),
            inputs.zeros(N_PARKED, n_value, d, dtype=_WIDE),
            inputs.zeros(N_PARKED, *decays, dtype=_WIDE),
        )
        said = fed(
            lengths,
            lambda rows, spans: gated_delta(mixed[rows], decay[rows], beta[rows], gate, state, spans),
            lambda spans: settle(state, spans),
            beside=beside,
            parks=parks,
            device=inputs.device,
        )
        return torch.cat(said), state.state[SLOT]

    return Passes(feed)


CASES: Mapping[str, Make] = {
    "decay per head": of_gated_delta,
    "decay per key": partial(of_gated_delta, per_key=True),
}
