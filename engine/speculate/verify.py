"""Verification by coupled match: the target picks at every row; a draft survives while it equals the pick.

The pick's noise is a pure function of (seed, position, token), so the kept tokens are those of plain decoding
with the same seed, for any drafter and any draft. Source: Gumbel-max coupling; see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from slipstream.engine.batch import Download
from slipstream.engine.sample.logprobs import Judged, Logprob
from slipstream.engine.sample.pick import Row, pick
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.acceptance import Acceptance
from slipstream.engine.speculate.drafter import Streams
from slipstream.kernels.choose.op import RowParams


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one pass says about one span."""

    token_ids: Sequence[int]  # accepted drafts, then the target's own token; -1 marks a row with NaN
    n_accepted: int
    streams: Streams | None = None  # what drafters read of the target's pass
    logprobs: Sequence[Logprob] = ()  # of those tokens, if the request asks
    prompt_logprobs: Sequence[Logprob] = ()  # of the prompt's tokens behind the span's rows, if it asks


class Picks:
    """The target's picks of a pass, launched and on their way to the host."""

    def __init__(
        self,
        logits: Tensor,
        spans: Sequence[tuple[Slot, Sequence[Row]]],
        params: RowParams | None = None,
    ) -> None:
        """logits: [n_rows, vocab] float32; spans: their rows in order. params: theirs, if at hand."""
        lengths = [len(rows) for _, rows in spans]
        self._rows = [slice(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]
        every = [row for _, rows in spans for row in rows]
        # [n_rows] int64, on the device
        self.token_ids = (
            pick(logits, every, params=params).token_ids if every else logits.new_empty(0, dtype=torch.int64)
        )
        self._judged = {
            i: Judged(logits[rows], self.token_ids[rows], slot.request.logprobs)
            for i, ((slot, _), rows) in enumerate(zip(spans, self._rows, strict=True))
            if slot.request.logprobs is not None
        }
        self._host = Download(self.token_ids)

    def read(self) -> list[list[int]]:
        """The picks of every span; waits until they are there."""
        picked: list[int] = self._host.read().tolist()
        return [picked[rows] for rows in self._rows]

    def verdict(
        self, i: int, slot: Slot, draft: Sequence[int], own: Sequence[int], acceptance: Acceptance
    ) -> Verdict:
        """The verdict on span i, whose drafts are `draft` and whose picks are `own`."""
        n_accepted = acceptance(slot, draft, own)
        kept = [*draft[:n_accepted], own[n_accepted]]
        told: Sequence[Logprob] = ()
        if i in self._judged:
            told = self._judged[i].read(kept if kept[-1] >= 0 else kept[:-1])
        return Verdict(kept, n_accepted, logprobs=told)
