"""The events of one request on the event loop's side. Closing the stream cancels the request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from slipstream.engine.api import Delta, Done, Event, Failed

_MOST_WAITING = 256  # deltas a slow reader may leave; more are joined, so memory is bounded by the text


class Stream:
    """Implements `engine.api.EventStream`. Used on the event loop alone."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        prompt_tail: str,
        *,
        owner: str = "",
        finish: Callable[[], None],
        cancel: Callable[[], None],
    ) -> None:
        self.finish = finish
        self.owner = owner
        self.prompt_ids = prompt_ids
        self.prompt_tail = prompt_tail
        self._cancel = cancel
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._over = False

    def push(self, event: Event) -> None:
        """Take an event from the engine; nothing follows a `Done` or `Failed`."""
        last = self._events[-1] if len(self._events) >= _MOST_WAITING else None
        if isinstance(event, Delta) and isinstance(last, Delta):
            self._events[-1] = _join(last, event)
        else:
            self._events.append(event)
        self._arrived.set()

    def break_off(self, event: Failed) -> None:
        """The event that nothing follows, in place of all that waits."""
        self._events = deque([event])
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._over = isinstance(event, Done | Failed)
        return event

    async def aclose(self) -> None:
        """Stop the request if it is not finished; no further event arrives."""
        if not self._over:
            self._over = True
            self._cancel()


def _join(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.sources + second.sources,
        first.pieces + second.pieces,
        first.logprobs + second.logprobs,
        first.steps + second.steps,
    )
