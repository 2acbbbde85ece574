"""A client's connection: uvicorn's h11 protocol with limits for heads and unread replies, errors in OpenAI's shape.

uvicorn does not limit the time that headers take: without this timeout a connection could stay silent for ever before
its first request, or after the first byte of the next. Nor does it ever give up a client that has asked for more than
it reads, whose replies would be held in memory. And what is sent to a client that has left it discards, at once, so
that a stream which always has more to send would run for ever and keep the event loop: here sending raises then.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import orjson
from starlette.types import Message, Receive, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.server.http.error_table import Problem
from slipstream.server.http.request_head import HEAD_LIMIT, RequestHeads

MALFORMED = Problem(400, "invalid_request_error", "malformed_request", "this is no HTTP request")
TOO_LONG = Problem(
    431,
    "invalid_request_error",
    "headers_too_large",
    f"the request's line and headers are longer than {HEAD_LIMIT} bytes",
)
REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}

# A stream ends itself after the timeout (`sse`). It should come first, as it says in the log why.
PATIENCE = 1.25


class ClientGone(ConnectionError):
    """The connection is lost, so nothing more can be sent on it. (ASGI's specification from 2.4 on asks for this.)"""


class Connection(H11Protocol):
    """Closes itself `timeout_s` after it was made, or after a request's first byte, unless the headers are complete.

    Also if for so long none of a reply is read that the system's buffers do not hold.
    """

    timeout_s = 60.0
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn: RequestHeads = RequestHeads()
        self.app = self._answer

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # the next request has already begun
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._was_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._was_read()
        super().resume_writing()

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        """The application with a `send` that raises `ClientGone` once the connection is lost."""
        cycle = self.cycle

        async def sending(message: Message) -> None:
            if self.transport.is_closing():
                cycle.disconnected = True  # uvicorn's own note of it comes when the event loop runs next
                raise ClientGone
            await send(message)

        await self.config.loaded_app(scope, receive, sending)

    def send_400_response(self, msg: str) -> None:
        # A request that has been answered, or is being, has no other answer: what came behind its head was no HTTP.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(TOO_LONG if self.conn.is_too_long else MALFORMED)
        self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        body = orjson.dumps(problem.content())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=problem.status, headers=headers, reason=REASONS[problem.status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _watch(self) -> None:
        """Start the clock where headers, or the rest of an answered request, are awaited; else stop it."""
        awaited = self.conn.their_state is h11.IDLE or (self.cycle and self.cycle.response_complete)
        if not awaited:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_s, self.transport.close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_for_reader(self) -> None:
        n_bytes = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(PATIENCE * self.timeout_s, self._check_reader, n_bytes)

    def _check_reader(self, n_before: int) -> None:
        if self.transport.get_write_buffer_size() < n_before:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def connection(timeout_s: float) -> type[Connection]:
    """The protocol class for uvicorn, which makes one instance of it per connection."""
    return type("Connection", (Connection,), {"timeout_s": timeout_s})
