"""Requests without a slot, in the order they came, and when a request has waited too long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.engine.errors import EngineError, Overloaded, TimedOut
from slipstream.engine.slot import Slot

NewSlot = Callable[[int], Slot]  # a waiting request: makes its slot state when it is given a slot id


@dataclass(frozen=True, slots=True)
class Queued:
    """A request without a slot."""

    id: str
    new_slot: NewSlot
    since_s: float  # `time.perf_counter`


class Waiting:
    """The queue. queue_s: seconds a request may stay in it; request_s: seconds it may take in all; 0: no limit."""

    def __init__(self, queue_s: float = 0.0, request_s: float = 0.0) -> None:
        self.queue_s, self.request_s = queue_s, request_s
        self._requests: deque[Queued] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, new_slot: NewSlot) -> None:
        self._requests.append(Queued(request_id, new_slot, time.perf_counter()))

    def pop(self) -> Queued:
        """The request that has waited longest leaves the queue."""
        return self._requests.popleft()

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids have left already."""
        self._requests = deque(one for one in self._requests if one.id != request_id)

    def expired(self) -> list[tuple[str, EngineError]]:
        """Requests that have waited too long leave the queue, each with the error it ends with."""
        now = time.perf_counter()
        found: list[tuple[str, EngineError]] = []
        while self._requests and (error := self._error(now - self._requests[0].since_s)) is not None:
            found.append((self._requests.popleft().id, error))
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
