"""Server-sent events; and cancellation: the generation of a client whose connection is lost ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import orjson
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from slipstream.engine.api import EventStream

T = TypeVar("T")

PING_S = 15.0  # proxies give up on a silent connection after 30 to 60 s
# U+0085, U+2028 and U+2029: they end no line of an event, but do to readers that go by `str.splitlines`, as httpx's
# `iter_lines` does.
_LINE_ENDS = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")
CLIENT_LEFT = 499  # for the log only: the client is gone


def event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event, without an id: after an id, a keep-alive comment breaks OpenAI's client."""
    return b"data: " + _LINE_ENDS.sub(_escaped, orjson.dumps(content)) + b"\n\n"


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


def named_event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event named by its type."""
    return f"event: {content['type']}\n".encode() + event(content)


async def close_all(streams: Sequence[EventStream]) -> None:
    """Cancel the generations that are not finished."""
    await asyncio.gather(*(stream.aclose() for stream in streams))


class Events(EventSourceResponse):
    """Sends `chunks` and closes `streams` when the response ends, for any reason, even before the first chunk.

    `grace_s`: how long a response may go on while the server stops.
    """

    def __init__(
        self, chunks: AsyncIterator[bytes], streams: Sequence[EventStream], *, grace_s: float
    ) -> None:
        super().__init__(
            chunks,
            headers={"Cache-Control": "no-cache"},
            sep="\n",
            ping=PING_S,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
            shutdown_event=anyio.Event(),
            shutdown_grace_period=grace_s,
        )
        self.streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await close_all(self.streams)

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Without the library's time limit, a sixth of the event loop's work for a token.

        `connection.py` has a limit for every kind of reply.
        """
        await send(message)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client left first, with `work` cancelled."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection. The body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
