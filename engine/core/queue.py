"""Requests without a slot, who of them is next, and when a request has waited too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.engine.errors import EngineError, Overloaded, TimedOut
from slipstream.engine.fair_queue import FairQueue
from slipstream.engine.slot import Slot


class Waiting:
    """The queue. queue_s: seconds a request may stay in it; request_s: seconds it may take in all; 0: no limit."""

    def __init__(self, queue_s: float = 0.0, request_s: float = 0.0) -> None:
        self.queue_s, self.request_s = queue_s, request_s
        self._slots: FairQueue[Slot] = FairQueue()

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: Slot, now_s: float) -> None:
        slot.stats.queued_s = now_s
        self._slots.add(slot.request.owner, slot)

    def pop(self, held: Mapping[str, int], free: Sequence[int]) -> Slot | None:
        """The next request for one of the free slots leaves the queue; None: all wait for other slots.

        held: how many slots each owner has.
        """
        try:
            return self._slots.pop(held, lambda one: one.request.slot is None or one.request.slot in free)
        except ValueError:
            return None

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids have left already."""
        self._slots.drop(lambda one: one.request.id == request_id)

    def expired(self, now_s: float) -> list[tuple[str, EngineError]]:
        """Requests that have waited too long leave the queue, each with the error it ends with."""
        if not self.queue_s and not self.request_s:
            return []
        late = self._slots.drop(lambda one: self.is_late(one, now_s))
        found: list[tuple[str, EngineError]] = [(one.request.id, TimedOut(self.request_s)) for one in late]
        reason = f"no slot became free within {self.queue_s:g} s; --max-queue-wait sets the limit"
        late = self._slots.drop(lambda one: bool(self.queue_s) and now_s - one.stats.queued_s > self.queue_s)
        return found + [(one.request.id, Overloaded(reason, self.queue_s)) for one in late]

    def is_late(self, slot: Slot, now_s: float) -> bool:
        """Whether a request has taken longer than it may, counted from its arrival."""
        return bool(self.request_s) and now_s - slot.stats.admitted_s > self.request_s
