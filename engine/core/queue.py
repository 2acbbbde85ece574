"""Requests without a slot, who of them is next, and when a request has waited too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.engine.errors import EngineError, Overloaded, TimedOut
from slipstream.engine.fair_queue import FairQueue
from slipstream.engine.slot import Slot

NewSlot = Callable[[int], Slot]  # a waiting request: makes its slot state when it is given a slot id


@dataclass(frozen=True, slots=True)
class Queued:
    """A request without a slot."""

    id: str
    new_slot: NewSlot
    since_s: float  # on the engine's clock
    slot_id: int | None = None  # the only slot that it may have


class Waiting:
    """The queue. queue_s: seconds a request may stay in it; request_s: seconds it may take in all; 0: no limit."""

    def __init__(self, queue_s: float = 0.0, request_s: float = 0.0) -> None:
        self.queue_s, self.request_s = queue_s, request_s
        self._requests: FairQueue[Queued] = FairQueue()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, owner: str, queued: Queued) -> None:
        self._requests.add(owner, queued)

    def pop(self, held: Mapping[str, int], free: Sequence[int]) -> Queued | None:
        """The next request for one of the free slots leaves the queue; None: all wait for other slots.

        held: how many slots each owner has.
        """
        try:
            return self._requests.pop(held, lambda one: one.slot_id is None or one.slot_id in free)
        except ValueError:
            return None

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids have left already."""
        self._requests.drop(lambda one: one.id == request_id)

    def expired(self, now_s: float) -> list[tuple[str, EngineError]]:
        """Requests that have waited too long leave the queue, each with the error it ends with."""
        found: list[tuple[str, EngineError]] = []
        for owner in self._requests.owners:
            while first := self._requests.first(owner):
                error = self._error(now_s - first.since_s)
                if error is None:
                    break
                found.append((self._requests.drop_first(owner).id, error))
        return found

    def _error(self, waited_s: float) -> EngineError | None:
        if self.is_late(waited_s):
            return TimedOut(self.request_s)
        if self.queue_s and waited_s > self.queue_s:
            reason = f"no slot became free within {self.queue_s:g} s; --max-queue-wait sets the limit"
            return Overloaded(reason, self.queue_s)
        return None

    def is_late(self, seconds: float) -> bool:
        """Whether a request may not take that long in all."""
        return bool(self.request_s) and seconds > self.request_s
