"""Verification by coupled match: the target picks at every row; a draft survives while it equals the pick.

The pick's noise is a pure function of (seed, position, token), so the kept tokens are those of plain decoding
with the same seed, for any drafter and any draft. Source: Gumbel-max coupling; see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from engine.sample.logprobs import Logprob, logprobs
from engine.sample.pick import pick
from engine.slot import Slot
from engine.speculate.acceptance import Acceptance, coupled
from engine.speculate.drafter import Draft, Streams


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one pass says about one span."""

    token_ids: Sequence[int]  # accepted drafts, then the target's own token; -1 marks a row with NaN
    n_accepted: int
    streams: Streams | None = None  # what drafters read of the target's pass
    logprobs: Sequence[Logprob] = ()  # of those tokens, if the request asks
    prompt_logprobs: Sequence[Logprob] = ()  # of the prompt's tokens behind the span's rows, if it asks


def _untimed(part: str) -> None:
    """Nobody asks where the time goes."""


def verify(
    logits: Tensor,
    drafts: Sequence[tuple[Slot, Draft]],
    acceptance: Acceptance = coupled,
    lap: Callable[[str], None] = _untimed,
) -> list[Verdict]:
    """Judge the drafts of all spans that have logits.

    logits: [sum of 1 + n_drafts, vocab] float32, in the order of `drafts`. Waits for the device. lap: told when
    `pick` and `wait` are over (`engine.core.clock`).
    """
    if not drafts:
        return []
    rows = [row for slot, draft in drafts for row in slot.rows(draft.token_ids)]
    lengths = [len(draft) + 1 for _, draft in drafts]
    starts = list(accumulate(lengths, initial=0))
    # Logits are edited in place, and log-probabilities are told of what they were before.
    raw = {
        start: logits[start : start + n].clone()  # [1 + n_drafts, vocab]
        for (slot, _), start, n in zip(drafts, starts, lengths, strict=False)
        if slot.request.logprobs is not None
    }
    chosen = pick(logits, rows).token_ids  # [n_rows] int64
    lap("pick")
    picks: list[int] = chosen.tolist()
    lap("wait")
    verdicts = []
    for (slot, draft), start, n in zip(drafts, starts, lengths, strict=False):
        own = picks[start : start + n]
        n_accepted = acceptance(slot, draft.token_ids, own)
        kept = [*draft.token_ids[:n_accepted], own[n_accepted]]
        told: Sequence[Logprob] = ()
        if slot.request.logprobs is not None:
            picked = kept if kept[-1] >= 0 else kept[:-1]
            told = logprobs(raw[start][: len(picked)], picked, slot.request.logprobs)
        verdicts.append(Verdict(kept, n_accepted, logprobs=told))
    return verdicts
