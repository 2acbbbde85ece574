"""Which requests hold slots: those that run, those preempted for older requests, and the queue of those without.

A request leaves the queue for a free slot and keeps it to its end. Short of pages the youngest gives way: its cached
state is dropped, its tokens stay, and it returns when there is room; its text goes on identically.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from slipstream.engine.cache.cache import Cache
from slipstream.engine.core.forward import STORE
from slipstream.engine.core.plan import Work
from slipstream.engine.core.queue import Waiting
from slipstream.engine.core.remembered import Remembered
from slipstream.engine.errors import EngineError, TimedOut
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain

log = logging.getLogger(__name__)


class Seats:
    """The slots of an engine, each with the request it serves."""

    def __init__(self, cache: Cache, chain: Chain, n_slots: int, waiting: Waiting) -> None:
        self._cache = cache
        self._chain = chain
        self.waiting = waiting
        self.slots: list[Slot | None] = [None] * n_slots
        self.running: list[Slot] = []  # oldest first
        self.preempted: list[Slot] = []  # without cached state, waiting for pages; oldest first
        self.remembered = Remembered(cache, self.slots)
        self.n_moves = 0  # times that a request entered or left a slot
        self.n_preempted = 0

    def __bool__(self) -> bool:
        """Whether there is any request."""
        return bool(self.running or self.preempted or self.waiting)

    def of(self, request_id: str) -> list[Slot]:
        """The slot of a request, if any."""
        return [slot for slot in (*self.running, *self.preempted) if slot.request.id == request_id]

    def expired(self) -> list[tuple[str, EngineError]]:
        """Requests whose time is up leave, each with the error it ends with."""
        now = time.perf_counter()
        ended = self.waiting.expired()
        for slot in (*self.running, *self.preempted):
            if self.waiting.is_late(now - slot.stats.admitted_s):
                self.free(slot)
                ended.append((slot.request.id, TimedOut(self.waiting.request_s)))
        return ended

    def fill(self) -> None:
        """Bring preempted slots back where pages suffice, then give free slots to waiting requests."""
        while self.preempted:
            slot = self.preempted[0]
            n_pages = -(-(len(slot.tokens) + 1) // self._cache.page_size) + 1
            if self.running and n_pages > self._cache.pool.n_available:
                return
            self._begin(self.preempted.pop(0))
        while self.waiting and None in self.slots:
            slot = self.waiting.pop()(self.slots.index(None))
            self.slots[slot.id] = slot
            self.remembered.put(slot.id, slot.tokens, slot.request.tenant)
            slot.stats.started_s = time.perf_counter()
            self._begin(slot)
            slot.stats.n_cached = slot.n_past

    def _begin(self, slot: Slot) -> None:
        self.n_moves += 1
        slot.n_past = self._cache.begin(slot.id, slot.tokens, slot.salt)
        self._chain.begin(slot)
        self.running.append(slot)
        self.running.sort(key=lambda one: one.stats.started_s)

    def cut(self, slot: Slot, n_tokens: int) -> None:
        """Cut a slot's sequence back to its first tokens; at least the prompt stays."""
        slot.truncate(n_tokens)
        slot.n_past = min(self._cache.rollback(slot.id, len(slot.tokens) - 1), slot.n_past)
        if slot in self.running:
            self._chain.start_over(slot)

    def has_room(self, one: Work) -> bool:
        """Whether there are pages for the work, as it is; they are the slot's from now on."""
        return self._cache.reserve(one.slot.id, STORE, one.start, one.end, len(one.draft))

    def make_room(self, works: Sequence[Work]) -> list[Work]:
        """The work that has pages. Short of room: fewer drafts, then the youngest slot goes back to its tokens.

        (Cached prefixes were evicted before that: the cache counts them as available.)
        """
        ready: list[Work] = []
        for one in sorted(works, key=lambda one: one.slot.stats.started_s):
            if one.slot not in self.running:
                continue  # preempted for an older slot a moment ago
            while not self.has_room(one):
                if one.draft:
                    one = one.with_draft_of(len(one.draft) // 2)
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                if victim is one.slot:
                    break
            else:
                ready.append(one)
        return ready

    def _preempt(self, slot: Slot) -> None:
        log.info("preempted request=%s n_tokens=%d", slot.request.id, len(slot.tokens))
        self.running.remove(slot)
        self._cache.drop(slot.id)
        slot.n_past = 0
        self.preempted.append(slot)
        self.preempted.sort(key=lambda one: one.stats.started_s)
        self.n_preempted += 1

    def free(self, slot: Slot) -> None:
        """The slot's request is over; its published pages stay with the prefix cache."""
        self.n_moves += 1
        self._chain.end(slot)
        if slot.constraint is not None:
            slot.constraint.close()
        self._cache.drop(slot.id)
        self.slots[slot.id] = None
        for where in (self.running, self.preempted):
            if slot in where:
                where.remove(slot)
