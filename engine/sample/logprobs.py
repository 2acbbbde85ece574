"""Log-probabilities of tokens: of the model's own rows, before anything is done to them.

Each row is computed alone and begins at the same place of a block of memory, so a token's value is the same with
speculation on or off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.engine.batch import Download

LEAST = -9999.0  # JSON has no infinity
# Floats. On a GPU torch sums a row in another order where it begins elsewhere in a block of 32 bytes.
_ALIGNED = 8


class Logprob(NamedTuple):
    """A token's log-probability, and the likeliest tokens of its row, falling; equal values by rising id."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]
    rank: int | None = None  # tokens at least as likely, itself included; None: not counted


class Judged:
    """Log-probabilities of rows' tokens, on their way from the device."""

    def __init__(self, logits: Tensor, token_ids: Tensor, n_top: int, *, ranked: bool = False) -> None:
        """logits: [n_rows, vocab] float32; token_ids: [n_rows] int64, where a negative id is not to be read.

        ranked: whether the tokens' ranks are counted.
        """
        vocab = logits.shape[1]
        if vocab % _ALIGNED:
            logits = F.pad(logits, (0, -vocab % _ALIGNED), value=-torch.inf)  # all rows begin alike
        values = torch.log_softmax(logits, dim=-1)[:, :vocab]  # [n_rows, vocab]
        values = values.nan_to_num(LEAST, neginf=LEAST).clamp(min=LEAST)
        own = values.gather(1, token_ids.clamp_min(0)[:, None])  # [n_rows, 1]
        self._own = Download(own[:, 0])
        self._ranks = Download((values >= own).sum(-1)) if ranked else None  # [n_rows] int64
        top = values.topk(min(n_top, vocab), dim=-1)  # [n_rows, n_top]
        self._top_ids, self._top = Download(top.indices), Download(top.values)

    def read(self, token_ids: Sequence[int]) -> list[Logprob]:
        """Log-probabilities of the first rows, whose tokens are `token_ids`; waits until the values are there."""
        own, ids, values = (
            one.read()[: len(token_ids)].tolist() for one in (self._own, self._top_ids, self._top)
        )
        n = len(token_ids)
        ranks = [None] * n if self._ranks is None else self._ranks.read()[:n].tolist()
        return [
            Logprob(
                token_id,
                value,
                sorted(zip(likeliest, their, strict=True), key=lambda one: (-one[1], one[0])),
                rank,
            )
            for token_id, value, likeliest, their, rank in zip(
                token_ids, own, ids, values, ranks, strict=True
            )
        ]
