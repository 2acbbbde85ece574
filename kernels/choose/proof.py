"""Proof of the pick: every row's token and probability, with edits and masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.choose.op import Edits, Masks, RowParams, choose
from slipstream.kernels.proof.case import N_ROWS, Make, Rows
from slipstream.kernels.proof.inputs import Inputs

_N_EDITS = 5  # of every row: its largest logits, pushed down


def of_choose(inputs: Inputs, vocab: int = 3000) -> Rows:
    device, g = inputs.device, inputs.g
    host = torch.randn(N_ROWS, vocab, generator=g) * 3
    host[:9] = (host[:9] * 2).round() / 2  # ties
    logits = host.to(device)
    params = {
        "temperature": inputs.column([1.0, 0.0, 0.7, 1.0], N_ROWS, torch.float32),
        "top_k": inputs.column([0, 0, 40, 0, 0], N_ROWS, torch.int32),
        "top_p": inputs.column([1.0, 0.9, 0.5], N_ROWS, torch.float32),
        "min_p": inputs.column([0.0, 0.05], N_ROWS, torch.float32),
        "seed": inputs.column(range(N_ROWS), N_ROWS, torch.int64),
        "position": inputs.column(range(7, 7 + N_ROWS), N_ROWS, torch.int64),
    }
    token_ids = host.topk(_N_EDITS).indices.int().flatten().to(device)  # [N_ROWS * _N_EDITS]
    starts = torch.arange(N_ROWS + 1, dtype=torch.int32, device=device) * _N_EDITS
    amounts = (torch.randn(3, len(token_ids), generator=g).abs() + 0.1).to(device)
    index = inputs.column([-1, 0, 1], N_ROWS, torch.int32)
    n_words = -(-vocab // 32)
    allowed = torch.randint(-(2**31), 2**31, (2, n_words), generator=g).int().to(device)

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows, entries = slice(first, first + n), slice(first * _N_EDITS, (first + n) * _N_EDITS)
        some = RowParams(**{name: value[rows] for name, value in params.items()})
        edits = Edits(starts[: n + 1], token_ids[entries], *(one[entries] for one in amounts))
        found = choose(logits[rows], some, edits, Masks(index[rows], allowed), want_probability=True)
        assert found.probability is not None
        return found.token_ids, found.probability

    return Rows(compute)


CASES: Mapping[str, Make] = {
    "many words": of_choose,
    "odd rows": partial(of_choose, vocab=1031),
}
