"""Log-probabilities of tokens: of the model's own rows, before anything is done to them.

Each row is computed alone, so a token's value is the same with speculation on or off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = -9999.0  # JSON has no infinity


class Logprob(NamedTuple):
    """A token's log-probability, and the likeliest tokens of its row, falling; equal ones by rising id."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]


def logprobs(logits: Tensor, token_ids: Sequence[int], n_top: int) -> list[Logprob]:
    """What each row says of its token. logits: [n_rows, vocab] float32; token_ids: [n_rows], none negative.

    Reads from the device.
    """
    if not token_ids:
        return []
    values = torch.log_softmax(logits, dim=-1)  # [n_rows, vocab]
    values = values.nan_to_num(LEAST, neginf=LEAST).clamp(min=LEAST)
    ids = torch.tensor(token_ids, device=logits.device)  # [n_rows]
    own = values.gather(1, ids[:, None])[:, 0].tolist()
    n_top = min(n_top, logits.shape[1])
    if not n_top:
        return [Logprob(token_id, value, ()) for token_id, value in zip(token_ids, own, strict=True)]
    top = values.topk(n_top, dim=-1)  # [n_rows, n_top]
    return [
        Logprob(
            token_id, value, sorted(zip(likeliest, their, strict=True), key=lambda one: (-one[1], one[0]))
        )
        for token_id, value, likeliest, their in zip(
            token_ids, own, top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]
