"""One pass of the target over the planned work, and what happens when it fails.

A pass is provisional, so it can be run again when it raises: first without drafts, then span by span; only a span that
fails alone fails its request. Recurrent states alone may have moved; they are made anew from the tokens before. When
the device is out of memory, the largest span's request ends and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.batch import Batch, Span
from engine.cache.cache import Cache
from engine.cache.store import Store
from engine.core.clock import Clock
from engine.core.plan import Work
from engine.errors import EngineError, StepFailed
from engine.layers.decoder import Taps
from engine.models.captured import Forward
from engine.models.network import Network
from engine.sample.logprobs import Logprob, logprobs
from engine.speculate.acceptance import Acceptance, coupled
from engine.speculate.drafter import Streams
from engine.speculate.verify import Verdict, verify

log = logging.getLogger(__name__)

STORE = "target"
_RESTORE_ROWS = 128  # of a pass that makes recurrent state anew; nothing else runs meanwhile


@dataclass(frozen=True, slots=True)
class Target:
    """The model served: its network, who accepts drafts, and the residual streams that drafters read of it."""

    network: Network
    acceptance: Acceptance = coupled
    taps: tuple[int, ...] = ()
    clock: Clock = field(default_factory=Clock)
    captured: Forward | None = None  # the network's forward where passes are captured

    def forward(self, batch: Batch, store: Store, taps: Taps | None = None) -> Tensor:
        """As `Network.forward`."""
        run = self.captured or self.network.forward
        return run(batch, store, taps)


Outcome = Verdict | EngineError


def run(target: Target, cache: Cache, works: Sequence[Work]) -> list[tuple[Work, Outcome]]:
    """Run a pass; per piece of work that was run, its verdict, or the error that ends its request."""
    try:
        return _pass(target, cache, works)
    except Exception:
        log.exception("pass failed spans=%d; trying again without drafts", len(works))
        return _again(target, cache, [one.without_draft() for one in works])


def _again(target: Target, cache: Cache, works: Sequence[Work]) -> list[tuple[Work, Outcome]]:
    """The second try, which isolates the spans that cannot be computed."""
    try:
        for one in works:
            _restore(target, cache, one)
        return _pass(target, cache, works)
    except (MemoryError, torch.OutOfMemoryError):
        largest = max(works, key=lambda one: one.n_certain)
        log.exception("out of memory in a pass; ending request=%s", largest.slot.request.id)
        return [(largest, StepFailed("out of memory in a pass; the largest request of the pass was ended"))]
    except Exception:
        log.exception("pass failed without drafts too spans=%d; trying each alone", len(works))
    outcomes: list[tuple[Work, Outcome]] = []
    for one in works:
        try:
            _restore(target, cache, one)
            outcomes += _pass(target, cache, [one])
        except Exception:
            log.exception("pass failed for one span alone request=%s", one.slot.request.id)
            outcomes.append((one, StepFailed("the pass failed for this request, also when tried alone")))
    return outcomes


def _restore(target: Target, cache: Cache, work: Work) -> None:
    """Bring the slot's state back to where the work starts, after a pass that broke off."""
    slot, n_past = work.slot, cache.recover(work.slot.id)
    while n_past < work.start:
        chunk = slot.tokens[n_past : min(work.start, n_past + _RESTORE_ROWS)]
        if not cache.reserve(slot.id, STORE, n_past, n_past + len(chunk)):
            raise RuntimeError("no pages to restore the state of a slot")
        target.forward(cache.batch(STORE, [Span(slot.id, chunk, n_past, 0, 0)]), cache.stores[STORE])
        n_past += len(chunk)
        cache.commit(slot.id, STORE, n_past)


def _pass(target: Target, cache: Cache, works: Sequence[Work]) -> list[tuple[Work, Outcome]]:
    batch = cache.batch(STORE, [one.span for one in works])
    target.clock.lap("batch")
    taps = Taps(target.taps) if target.taps else None
    logits = target.forward(batch, cache.stores[STORE], taps)  # [n_logits, vocab] float32
    target.clock.lap("forward")
    picked, prompts = _split(works, logits)
    drafts = [(one.slot, one.draft) for one in works if one.n_picks]
    verdicts = verify(picked, drafts, target.acceptance, target.clock.lap)
    found = iter(verdicts)
    outcomes: list[tuple[Work, Outcome]] = []
    first = 0
    for one, prompt in zip(works, prompts, strict=True):
        verdict = next(found) if one.n_picks else Verdict((), 0)
        streams = Streams(taps, first) if taps else None
        if streams is not None or prompt:
            verdict = replace(verdict, streams=streams, prompt_logprobs=prompt)
        outcomes.append((one, verdict))
        first += one.n_rows
    return outcomes


def _split(works: Sequence[Work], logits: Tensor) -> tuple[Tensor, list[Sequence[Logprob]]]:
    """(rows that need a pick, [n_picks, vocab]; what the other rows say of each work's prompt).

    logits: [n_logits, vocab] float32, work by work.
    """
    if all(one.n_logits == one.n_picks for one in works):
        return logits, [()] * len(works)
    picked: list[Tensor] = []
    prompts: list[Sequence[Logprob]] = []
    ends = accumulate(one.n_logits for one in works)
    for one, end in zip(works, ends, strict=True):
        rows = logits[end - one.n_logits : end]  # [n_logits of the work, vocab]
        picked.append(rows[one.n_logits - one.n_picks :])
        slot, n_top = one.slot, one.slot.request.logprobs
        if slot.prompt_logprobs is None or n_top is None:
            prompts.append(())
            continue
        # The row at position p speaks of the token at p + 1.
        successors = slot.tokens[one.start + 1 : min(one.end + 1, slot.n_prompt)]
        prompts.append(logprobs(rows[: len(successors)], successors, n_top))
    return torch.cat(picked), prompts
