"""One pass of the target over the planned work: launched, later read; and what happens when it fails.

A pass is provisional, so it can be run again when it raises: first without drafts, then span by span; only a span that
fails alone fails its request. Recurrent states alone may have moved; they are made anew from the tokens before. When
the device is out of memory, the largest span's request ends and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.batch import Batch, Download, Span, upload
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.store import Store
from slipstream.engine.core.clock import Clock
from slipstream.engine.core.plan import Work
from slipstream.engine.errors import EngineError, StepFailed
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.captured import Forward
from slipstream.engine.models.network import Network
from slipstream.engine.sample.logprobs import Judged
from slipstream.engine.sample.pick import Row, row_params
from slipstream.engine.speculate.acceptance import Acceptance, coupled
from slipstream.engine.speculate.drafter import Draft, Streams
from slipstream.engine.speculate.foreseen import UnreadDrafts
from slipstream.engine.speculate.tails import Ran, Tails
from slipstream.engine.speculate.verify import Picks, Verdict
from slipstream.kernels.choose.op import RowParams

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


@dataclass(slots=True)
class Flight:
    """A pass that was launched and that nobody has read."""

    works: list[Work | None]  # None: it counts no more, its request is over or was cut back
    n_rows: Sequence[int]  # of each work, as launched
    n_picks: Sequence[int]  # of each work
    drafts: Sequence[Draft]  # of each work
    behind: Behind | None = None  # what it took from the device
    picks: Picks | None = None  # None: the pass could not be launched
    token_ids: Tensor | None = None  # [n_rows of all] int64
    taps: Taps | None = None
    # Per work, what its rows say of its prompt, and the tokens that this is about.
    prompts: Sequence[tuple[Judged, Sequence[int]] | None] = ()
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, works: Sequence[Work], behind: Behind | None = None) -> Flight:
        counts = [one.n_rows for one in works], [one.n_picks for one in works]
        return cls([*works], *counts, [one.draft for one in works], behind)

    @property
    def guesses(self) -> UnreadDrafts | None:
        """What its drafts are, if only the device knows."""
        return None if self.behind is None else self.behind.guesses

    @property
    def firsts(self) -> Sequence[int]:
        """The first row of each work."""
        return list(accumulate(self.n_rows, initial=0))[:-1]

    @property
    def is_certain(self) -> bool:
        """Whether it has no drafts: how long its sequences will be is known."""
        return all(n <= 1 for n in self.n_picks)

    def keep_streams(self) -> None:
        """Copy what a replay of the captured pass would overwrite."""
        if self.taps is not None:
            self.taps = self.taps.copy()

    @property
    def ran(self) -> Ran:
        """What it leaves on the device. To be asked before the next batch is built, and looked at before it is run."""
        assert self.picks is not None
        assert self.token_ids is not None
        names = [-1 - i if one is None else one.slot.id for i, one in enumerate(self.works)]
        ends = zip(names, accumulate(self.n_rows), self.n_picks, strict=True)
        rows = {name: range(end - n, end) for name, end, n in ends if n}
        drafts = None if self.guesses is None else self.guesses.token_ids
        return Ran(rows, self.token_ids, self.picks.token_ids, drafts, self.taps)


@dataclass(frozen=True, slots=True)
class Behind:
    """What a pass takes from the device, because it is launched before the host knows it."""

    tails: Tails
    spans: Sequence[int]  # which of the pass's works go on from them
    is_certain: bool  # whether nothing can have been lost
    guesses: UnreadDrafts | None  # the drafts of its works
    lost: Download  # the tails' n_lost

    def fill(self, batch: Batch, page_size: int) -> None:
        """Put into the batch what the host left open."""
        lengths = [len(span.token_ids) for span in batch.spans]
        firsts = np.cumsum([0, *lengths])[np.asarray(self.spans)]
        rows, values = [firsts], [self.tails.last[:, 1]]
        if self.guesses is not None:
            rows += [
                first + 1 + np.arange(batch.spans[i].n_drafts)
                for i, first in zip(self.spans, firsts, strict=True)
            ]
            values.append(self.guesses.token_ids.clamp_min(0))  # a row with NaN guesses no token
        (index,) = upload((np.concatenate(rows),), batch.token_ids.device)
        batch.token_ids.index_copy_(0, index, torch.cat(values))
        if not self.is_certain:
            batch.move_back(self._lost(len(lengths)), page_size)

    def params(self, rows: Sequence[Sequence[Row]], device: torch.device) -> RowParams:
        """Of the rows of every work."""
        params = row_params([row for own in rows for row in own], device)
        if self.is_certain:
            return params
        owners = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
        (index,) = upload((owners,), device)
        return replace(params, position=params.position - self._lost(len(rows))[index])

    def begun(self, works: Sequence[Work | None]) -> list[Work | None]:
        """The pass's works where they really began, now that the pass before has been read.

        One that began elsewhere than its slot is counts no more: the device and the host have to agree on every token.
        """
        lost = dict(zip(self.spans, self.lost.read().tolist(), strict=True))
        begun = [
            one if one is None else (one.start - lost.get(i, 0), one.now()) for i, one in enumerate(works)
        ]
        return [one[1] if one is not None and one[0] == one[1].start else None for one in begun]

    def _lost(self, n_works: int) -> Tensor:  # [n_works] int64
        lost = self.tails.n_lost
        (index,) = upload((np.asarray(self.spans),), lost.device)
        return lost.new_zeros(n_works).index_copy_(0, index, lost)


def launch(target: Target, cache: Cache, works: Sequence[Work], behind: Behind | None = None) -> Flight:
    """Launch a pass; behind: the one before, if nobody has read that. What fails is tried again when it is read."""
    flight = Flight.of(works, behind)
    try:
        _launch(target, cache, flight, works)
    except Exception:
        log.exception("pass failed spans=%d; trying again without drafts", len(works))
    return flight


def read(target: Target, cache: Cache, flight: Flight) -> list[tuple[Work, Outcome]]:
    """Wait for a pass; per work that still counts, its verdict, or the error that ends its request."""
    if flight.picks is not None:
        try:
            return _verdicts(target, flight)
        except Exception:
            log.exception("pass failed spans=%d; trying again without drafts", len(flight.works))
    return _again(target, cache, [one.without_draft() for one in flight.works if one is not None])


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
    flight = Flight.of(works)
    _launch(target, cache, flight, works)
    return _verdicts(target, flight)


def _launch(target: Target, cache: Cache, flight: Flight, works: Sequence[Work]) -> None:
    behind = flight.behind
    batch = cache.batch(STORE, [one.span for one in works])
    if behind is not None:
        behind.fill(batch, cache.page_size)
    target.clock.lap("batch")
    flight.token_ids = batch.token_ids
    flight.taps = Taps(target.taps) if target.taps else None
    logits = target.forward(batch, cache.stores[STORE], flight.taps)  # [n_logits, vocab] float32
    target.clock.lap("forward")
    logits, flight.prompts = _split(works, logits)
    rows = [one.rows for one in works]
    params = None if behind is None else behind.params(rows, logits.device)
    spans = [(one.slot, own) for one, own in zip(works, rows, strict=True) if own]
    flight.picks = Picks(logits, spans, params)
    target.clock.lap("pick")


def _verdicts(target: Target, flight: Flight) -> list[tuple[Work, Outcome]]:
    assert flight.picks is not None
    picked = enumerate(flight.picks.read())
    target.clock.lap("wait")
    outcomes: list[tuple[Work, Outcome]] = []
    drafts = flight.drafts if flight.guesses is None else flight.guesses.drafts(flight.drafts)
    works = zip(flight.works, drafts, flight.n_picks, strict=True)
    for (one, draft, n_picks), prompt, first in zip(works, flight.prompts, flight.firsts, strict=True):
        i, own = next(picked) if n_picks else (-1, [])
        if one is None:
            continue
        verdict = Verdict((), 0)
        if n_picks:
            verdict = flight.picks.verdict(i, one.slot, draft.token_ids, own, target.acceptance)
        streams = Streams(flight.taps, first) if flight.taps else None
        told = () if prompt is None else prompt[0].read(prompt[1])
        outcomes.append((replace(one, draft=draft), replace(verdict, streams=streams, prompt_logprobs=told)))
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
        slot, n_top = one.slot, one.slot.request.logprobs
        if slot.prompt_logprobs is None or n_top is None:
            prompts.append(None)
            continue
        # The row at position p speaks of the token at p + 1.
        successors = slot.tokens[one.start + 1 : min(one.end + 1, slot.n_prompt)]
        (ids,) = upload((np.asarray(successors, np.int64),), logits.device)
        prompts.append((Judged(rows[: len(successors)], ids, n_top), successors))
    return torch.cat(picked), prompts
