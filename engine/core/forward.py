"""One pass of the target over the planned work: launched, later read; and what happens when it fails.

A pass is provisional, so it can be run again when it raises: first without drafts, then span by span; only a span that
fails alone fails its request. Only recurrent states may have moved; they are recomputed from the tokens before. When
the device is out of memory, the largest span's request ends and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.batch import Span, upload
from slipstream.engine.cache.cache import Cache
from slipstream.engine.core.clock import Clock
from slipstream.engine.core.flight import Flight
from slipstream.engine.core.plan import Work
from slipstream.engine.device_loss import raise_if_lost
from slipstream.engine.errors import EngineError, StepFailed
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.network import Network
from slipstream.engine.sample.logprobs import Judged
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.acceptance import Acceptance, coupled
from slipstream.engine.speculate.drafter import NO_DRAFT, Draft, Streams
from slipstream.engine.speculate.verify import Picks, Verdict
from slipstream.kernels.device_fault import is_out_of_memory

log = logging.getLogger(__name__)

STORE = "target"
_RESTORE_ROWS = 128  # of a pass that makes recurrent state anew; nothing else runs meanwhile


@dataclass(frozen=True, slots=True)
class Target:
    """The model served: its network, the rule that accepts drafts, and the residual streams that drafters read."""

    network: Network
    clock: Clock
    acceptance: Acceptance = coupled
    taps: tuple[int, ...] = ()
    # Whether a drafter reads the streams of the slot's rows.
    reads: Callable[[Slot], bool] = lambda slot: True


Outcome = Verdict | EngineError


def launch(target: Target, cache: Cache, flight: Flight) -> Flight:
    """Launch a pass. A pass that fails is tried again when it is read. Raises `DeviceLost`."""
    try:
        _launch(target, cache, flight)
    except Exception as error:
        raise_if_lost(error)
        log.exception("pass failed spans=%d; trying again without drafts", len(flight.works))
    return flight


def read(target: Target, cache: Cache, flight: Flight) -> list[tuple[Work, Outcome]]:
    """Wait for a pass; per work that still counts, its verdict, or the error that ends its request.

    Raises `DeviceLost`.
    """
    drafts = flight.read_drafts()
    if flight.picks is not None:
        try:
            return _verdicts(target, flight, drafts)
        except Exception as error:
            raise_if_lost(error)
            log.exception("pass failed spans=%d; trying again without drafts", len(flight.works))
    return _again(target, cache, [one.with_draft(NO_DRAFT) for one in flight.works if one is not None])


def _again(target: Target, cache: Cache, works: Sequence[Work]) -> list[tuple[Work, Outcome]]:
    """The second try, which isolates the spans that cannot be computed."""
    try:
        for one in works:
            _restore(target, cache, one)
        return _pass(target, cache, works)
    except Exception as error:
        raise_if_lost(error)
        if is_out_of_memory(error):
            largest = max(works, key=lambda one: one.n_certain)
            fault = StepFailed("out of memory in a pass; the largest request of the pass was ended")
            fault.__cause__ = error
            return [(largest, fault)]
        log.exception("pass failed without drafts too spans=%d; trying each alone", len(works))
    outcomes: list[tuple[Work, Outcome]] = []
    for one in works:
        try:
            _restore(target, cache, one)
            outcomes += _pass(target, cache, [one])
        except Exception as error:  # noqa: BLE001 - the engine logs it with its request
            raise_if_lost(error)
            fault = StepFailed("the pass failed for this request, also when tried alone")
            fault.__cause__ = error
            outcomes.append((one, fault))
    return outcomes


def _restore(target: Target, cache: Cache, work: Work) -> None:
    """Bring the slot's state back to where the work starts, after a pass that broke off."""
    slot, n_past = work.slot, cache.recover(work.slot.id)
    while n_past < work.start:
        chunk = slot.tokens[n_past : min(work.start, n_past + _RESTORE_ROWS)]
        if not cache.reserve(slot.id, STORE, n_past, n_past + len(chunk)):
            raise RuntimeError("no pages to restore the state of a slot")
        target.network.forward(
            cache.batch(STORE, [Span(slot.id, chunk, n_past, 0, 0, slot.images)]), cache.stores[STORE]
        )
        n_past += len(chunk)
        cache.commit(slot.id, STORE, n_past)


def _pass(target: Target, cache: Cache, works: Sequence[Work]) -> list[tuple[Work, Outcome]]:
    flight = Flight([*works])
    _launch(target, cache, flight)
    return _verdicts(target, flight, flight.read_drafts())


def _launch(target: Target, cache: Cache, flight: Flight) -> None:
    works = flight.planned
    batch = cache.batch(STORE, [one.span for one in works])
    flight.fill(batch, cache.page_size)
    target.clock.lap("batch")
    flight.token_ids = batch.token_ids
    is_read = bool(target.taps) and any(target.reads(one.slot) for one in works)
    flight.taps = Taps(target.taps) if is_read else None
    logits = target.network.forward(batch, cache.stores[STORE], flight.taps)  # [n_logits, vocab] float32
    target.clock.lap("forward")
    logits, flight.prompts = _split(works, logits)
    rows = [one.rows for one in works]
    spans = [(one.slot, own) for one, own in zip(works, rows, strict=True) if own]
    flight.picks = Picks(logits, spans, flight.params(rows, logits.device))
    target.clock.lap("pick")


def _verdicts(target: Target, flight: Flight, drafts: Sequence[Draft]) -> list[tuple[Work, Outcome]]:
    assert flight.picks is not None
    picked = enumerate(flight.picks.read())
    target.clock.lap("wait")
    outcomes: list[tuple[Work, Outcome]] = []
    works = zip(flight.works, flight.planned, drafts, flight.prompts, flight.firsts, strict=True)
    for one, planned, draft, prompt, first in works:
        i, own = next(picked) if planned.n_picks else (-1, [])
        if one is None:
            continue
        verdict = Verdict((), 0)
        if planned.n_picks:
            verdict = flight.picks.verdict(i, one.slot, draft.token_ids, own, target.acceptance)
        if flight.taps:
            verdict = replace(verdict, streams=Streams(flight.taps, first))
        if prompt is not None:
            verdict = replace(verdict, prompt_logprobs=prompt[0].read(prompt[1]))
        outcomes.append((one.with_draft(draft), verdict))
    return outcomes


def _split(works: Sequence[Work], logits: Tensor) -> tuple[Tensor, list[tuple[Judged, Sequence[int]] | None]]:
    """(rows that need a pick, [n_picks, vocab]; what the other rows say of each work's prompt).

    logits: [n_logits, vocab] float32, work by work.
    """
    if all(one.n_logits == one.n_picks for one in works):
        return logits, [None] * len(works)
    picked: list[Tensor] = []
    prompts: list[tuple[Judged, Sequence[int]] | None] = []
    ends = accumulate(one.n_logits for one in works)
    for one, end in zip(works, ends, strict=True):
        rows = logits[end - one.n_logits : end]  # [n_logits of the work, vocab]
        picked.append(rows[one.n_logits - one.n_picks :])
        slot, n_top = one.slot, one.slot.request.prompt_logprobs
        if slot.prompt_logprobs is None or n_top is None:
            prompts.append(None)
            continue
        # The row at position p speaks of the token at p + 1.
        successors = slot.tokens[one.start + 1 : min(one.end + 1, slot.n_prompt)]
        (ids,) = upload((np.asarray(successors, np.int64),), logits.device)
        prompts.append((Judged(rows[: len(successors)], ids, n_top, ranked=True), successors))
    return torch.cat(picked), prompts
