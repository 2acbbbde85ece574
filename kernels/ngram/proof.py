"""Proof of the search for earlier occurrences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.kernels.ngram.op import ngram
from slipstream.kernels.proof.case import Make, Once
from slipstream.kernels.proof.inputs import Inputs


def of_ngram(inputs: Inputs) -> Once:
    """Texts of few words, empty and full ones among them; padding."""
    tokens = torch.randint(0, 3, (6, 500), generator=inputs.g).int().to(inputs.device)
    lengths = inputs.column([0, 1, 500, 17, 300, 499], 6, torch.int32)
    slots = inputs.column([5, -1, 2, 0, 1, 3, 4, 2], 8, torch.int64)

    def call() -> Sequence[Tensor]:
        return ngram(tokens, lengths, slots, 8)

    return Once(call)


CASES: Mapping[str, Make] = {
    "texts": of_ngram,
}
