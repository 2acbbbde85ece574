"""Proof of the verification: spans of every kind, a text that is nearly full."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.kernels.proof.case import Make, Once
from slipstream.kernels.proof.inputs import Inputs
from slipstream.kernels.verify.op import verify

_LENGTHS = (1, 2, 0, 17, 5, 40)


def of_verify(inputs: Inputs) -> Once:
    """Drafts of which a tenth is wrong."""
    device, g = inputs.device, inputs.g
    starts = [0, *itertools.accumulate(_LENGTHS)]
    picks = torch.randint(0, 5, (starts[-1],), generator=g)
    drafts = torch.cat([picks[a : max(a, b - 1)] for a, b in itertools.pairwise(starts)])
    drafts[torch.rand(len(drafts), generator=g) < 0.1] = 7
    picks[-1] = -1  # a row with NaN
    slots = inputs.column([3, 0, 5, -1, 1, 2], len(_LENGTHS), torch.int64)
    tokens = torch.randint(0, 5, (6, 60), generator=g).int().to(device)
    lengths = inputs.column([0, 58, 30, 1, 2, 3], 6, torch.int32)
    span_starts = torch.tensor(starts, dtype=torch.int32, device=device)

    def call() -> Sequence[Tensor]:
        return (
            *verify(picks.to(device), drafts.to(device), span_starts, slots, tokens, lengths),
            tokens,
            lengths,
        )

    return Once(call)


CASES: Mapping[str, Make] = {
    "spans": of_verify,
}
