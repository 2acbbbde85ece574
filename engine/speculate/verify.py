"""Verification by coupled match: the target picks at every row; a draft survives while it equals the pick.

The pick's noise is a pure function of (seed, position, token), so the kept tokens are those of plain decoding
with the same seed, for any drafter and any draft. Source: Gumbel-max coupling; see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.sample.pick import Row, pick
from engine.slot import Slot
from engine.speculate.acceptance import Acceptance, coupled
from engine.speculate.drafter import Draft, Streams


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one pass says about one span."""

    token_ids: Sequence[int]  # accepted drafts, then the target's own token; -1 marks a row with NaN
    n_accepted: int
    streams: Streams | None = None  # what drafters read of the target's pass


def verify(
    logits: Tensor, drafts: Sequence[tuple[Slot, Draft]], acceptance: Acceptance = coupled
) -> list[Verdict]:
    """Judge the drafts of all spans that have logits.

    logits: [sum of 1 + n_drafts, vocab] float32, in the order of `drafts`. Waits for the device.
    """
    rows: list[Row] = []
    for slot, draft in drafts:
        rows.extend(slot.row(draft.token_ids[:j]) for j in range(len(draft) + 1))
    picks: list[int] = pick(logits, rows).token_ids.tolist()
    verdicts = []
    start = 0
    for slot, draft in drafts:
        own = picks[start : start + len(draft) + 1]
        n_accepted = acceptance(slot, draft.token_ids, own)
        verdicts.append(Verdict([*draft.token_ids[:n_accepted], own[n_accepted]], n_accepted))
        start += len(own)
    return verdicts
