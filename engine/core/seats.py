"""Which requests hold slots: those that run, those preempted for older requests, and the queue of those without.

A request leaves the queue for a free slot and keeps it to its end. Short of pages the youngest gives way: its cached
state is dropped, its tokens stay, and it returns when there is room; its text goes on identically.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from slipstream.engine.api import Failed
from slipstream.engine.cache import saved
from slipstream.engine.cache.cache import Cache
from slipstream.engine.core.forward import STORE
from slipstream.engine.core.plan import Work
from slipstream.engine.core.queue import Waiting
from slipstream.engine.core.remembered import Remembered
from slipstream.engine.device_loss import Spared
from slipstream.engine.errors import EngineError, EngineFault, StepFailed, TimedOut
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain

log = logging.getLogger(__name__)


class Seats:
    """The slots of an engine, each with the request it serves."""

    def __init__(
        self, cache: Cache, chain: Chain, n_slots: int, waiting: Waiting, now: Callable[[], float]
    ) -> None:
        """now: the engine's clock."""
        self._now = now
        self._cache = cache
        self._chain = chain
        self.waiting = waiting
        self.slots: list[Slot | None] = [None] * n_slots
        self.running: list[Slot] = []  # oldest first
        self.preempted: list[Slot] = []  # without cached state, waiting for pages; oldest first
        self.remembered = Remembered(cache, self.slots)
        self.n_moves = 0  # times that a request entered or left a slot
        self.n_preempted = 0
        self._failed: list[tuple[Slot, EngineError]] = []  # since `failures` was asked last

    def __bool__(self) -> bool:
        """Whether there is any request."""
        return bool(self.running or self.preempted or self.waiting)

    def of(self, request_id: str) -> list[Slot]:
        """The slot of a request, if any."""
        return [slot for slot in (*self.running, *self.preempted) if slot.request.id == request_id]

    def expired(self) -> list[tuple[str, Failed]]:
        """Requests whose time is up leave, each with its last event."""
        now = self._now()
        ended = [(name, Failed(error)) for name, error in self.waiting.expired(now)]
        for slot in (*self.running, *self.preempted):
            if self.waiting.is_late(slot, now):
                self.free(slot)
                ended.append((slot.request.id, Failed(TimedOut(self.waiting.request_s))))
        return ended

    def guard(self, slot: Slot) -> Spared:
        """What is done for one request alone. If it raises, this request ends (`failures`), and no other.

        Raises `DeviceLost`.
        """
        return Spared(partial(self._note, slot))

    def _note(self, slot: Slot, error: Exception) -> None:
        if not isinstance(error, EngineError):
            fault = StepFailed("the engine failed for this request alone")
            fault.__cause__ = error
            error = fault
        self._failed.append((slot, error))

    def failures(self) -> list[tuple[str, Failed]]:
        """End the requests that failed, each with its last event and, if that is our fault, a line in the log.

        Whatever is stored of their tokens is withdrawn: a fault may have spoiled it.
        """
        ended = {}
        failed = [*self._failed]
        self._failed.clear()
        for slot, error in failed:
            request_id = slot.request.id
            if request_id in ended:
                continue
            ended[request_id] = Failed(error)
            if isinstance(error, EngineFault):
                log.error("request failed request=%s: %s", request_id, error, exc_info=error.__cause__)
                self._distrust(slot)
            self.free(slot)
        return list(ended.items())

    def _distrust(self, slot: Slot) -> None:
        saved.erase(self._cache, slot.tokens, slot.salt, slot.images, held=True)

    def start_over(self, slot: Slot) -> None:
        """Compute a slot's sequence anew, from its tokens alone; what was stored of them is withdrawn."""
        log.warning("not a number behind stored pages, which are made anew request=%s", slot.request.id)
        self._distrust(slot)
        self.running.remove(slot)
        with self.guard(slot):
            self._begin(slot)

    def fill(self) -> None:
        """Bring preempted slots back where pages suffice, then give free slots to waiting requests.

        A free slot goes to the owner with the fewest, of several to the one that was given one longest ago. A request
        that wants one slot alone is passed over while that is taken.
        """
        while self.preempted:
            slot = self.preempted[0]
            n_pages = -(-(len(slot.tokens) + 1) // self._cache.page_size) + 1
            if self.running and n_pages > self._cache.pool.n_available:
                return
            with self.guard(slot):
                self._begin(self.preempted.pop(0))
        while self.waiting and None in self.slots:
            held = Counter(slot.request.owner for slot in self.slots if slot is not None)
            free = [i for i, slot in enumerate(self.slots) if slot is None]
            next_slot = self.waiting.pop(held, free)
            if next_slot is None:
                return
            wanted = next_slot.request.slot
            next_slot.id = self.remembered.choose(free, next_slot) if wanted is None else wanted
            self._seat(next_slot)

    def _seat(self, slot: Slot) -> None:
        self.slots[slot.id] = slot
        with self.guard(slot):
            self.remembered.begin(slot)
            slot.stats.started_s = self._now()
            slot.stats.n_cached = slot.n_prompt
            self._begin(slot)

    def _begin(self, slot: Slot) -> None:
        self.n_moves += 1
        slot.n_past = self._cache.begin(slot.id, slot.tokens, slot.salt, slot.images)
        slot.is_behind_stored = slot.n_past > 0
        if not slot.stats.first_token_s:  # or the prompt was computed long ago
            # What the request itself computed before it started over was never cached for it.
            slot.stats.n_cached = min(slot.n_past, slot.stats.n_cached)
        self._chain.begin(slot)
        self.running.append(slot)
        self.running.sort(key=lambda one: one.stats.started_s)

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
            with self.guard(one.slot):
                while not self.has_room(one):
                    if one.draft:
                        one = one.with_draft(one.draft.first(len(one.draft) // 2))
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
        self._cache.drop(slot.id)
        self.slots[slot.id] = None
        for where in (self.running, self.preempted):
            if slot in where:
                where.remove(slot)
