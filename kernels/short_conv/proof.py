"""Proof of the short convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.kernels.proof.case import N_ROWS, Make, Passes
from slipstream.kernels.proof.inputs import Inputs
from slipstream.kernels.proof.updates import N_PARKED, N_SLOTS, SLOT, fed
from slipstream.kernels.short_conv.op import ConvState, settle_window, short_conv

_WIDTH = 4


def of_short_conv(inputs: Inputs, n_channels: int = 333) -> Passes:
    x = inputs.normal(N_ROWS, n_channels)
    weight = inputs.normal(_WIDTH, n_channels).T  # [n_channels, width]

    def feed(lengths: Sequence[int], *, beside: bool, parks: bool = False) -> Sequence[Tensor]:
        window = inputs.zeros(N_SLOTS, _WIDTH - 1, n_channels)
        state = ConvState(window, inputs.zeros(N_PARKED, n_channels))
        said = fed(
            lengths,
            lambda rows, spans: short_conv(x[rows], weight, state, spans),
            lambda spans: settle_window(state, spans),
            beside=beside,
            parks=parks,
            device=inputs.device,
        )
        return torch.cat(said), window[SLOT]

    return Passes(feed)


CASES: Mapping[str, Make] = {
    "in passes": of_short_conv,
}
