"""A client's connection: uvicorn's h11 protocol with limits for heads and unread replies, errors in OpenAI's shape, and
a short way for the events of a stream.

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
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.server.http.error_table import Refused
from slipstream.server.http.request_head import HEAD_LIMIT, RequestHeads
from slipstream.server.report.logs import logger

log = logger(__name__)

MALFORMED = Refused(400, "invalid_request_error", "malformed_request", "this is no HTTP request")
TOO_LONG = Refused(
    431,
    "invalid_request_error",
    "headers_too_large",
    f"the request's line and headers are longer than {HEAD_LIMIT} bytes",
)
REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}

# Of a reply that waits, a client has to take so many bytes within the time limit. A stream begins to wait at 64 KiB and
# goes on at 16, so it ends if it waits for longer than the limit.
LEAST_READ = 48 << 10


class ClientGone(ConnectionError):
    """The connection is lost, so nothing more can be sent on it. (ASGI's specification from 2.4 on asks for this.)"""


class Connection(H11Protocol):
    """Closes itself `timeout_s` after it was made, or after a request's first byte, unless the headers are complete.

    Also if within that time less than LEAST_READ of a reply is read that the system's buffers do not hold.
    """

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, timeout_s: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self.timeout_s = timeout_s
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
        """The application with a `send` that raises `ClientGone` once the connection is lost.

        Events are written here, as chunks (RFC 9112, 7.1): uvicorn's and h11's way, which the head and the end of a
        stream go, would be a seventh of the event loop's work for a token.
        """
        cycle = self.cycle
        has_events = False

        async def sending(message: Message) -> None:
            nonlocal has_events
            if self.transport.is_closing():
                cycle.disconnected = True  # uvicorn's own note of it comes when the event loop runs next
                raise ClientGone
            if has_events and message.get("more_body") and message["body"] and not self.flow.write_paused:
                body = message["body"]
                self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
                return
            await send(message)
            if message["type"] == "http.response.start":
                has_events = self.conn.their_http_version == b"1.1" and _has_events(message)

        await self.config.loaded_app(scope, receive, sending)

    def send_400_response(self, msg: str) -> None:
        # A request that has been answered, or is being, has no other answer: what came behind its head was no HTTP.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(TOO_LONG if self.conn.is_too_long else MALFORMED)
        self.transport.close()

    def _refuse(self, problem: Refused) -> None:
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
        self._unread = self.loop.call_later(self.timeout_s, self._check_reader, n_bytes)

    def _check_reader(self, n_before: int) -> None:
        if n_before - self.transport.get_write_buffer_size() >= LEAST_READ:
            self._wait_for_reader()
        else:
            log.warning("reader_timeout", seconds=self.timeout_s)
            self.transport.abort()

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class ReaderLimit:
    """ASGI layer for connections of other servers, which wait for a slow reader without end: it is gone after a while.

    Every message has `timeout_s` to be taken.
    """

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self.app = app
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def limited(message: Message) -> None:
            try:
                async with asyncio.timeout(self.timeout_s):
                    await send(message)
            except TimeoutError:
                log.warning("reader_timeout", seconds=self.timeout_s)
                raise ClientGone from None

        await self.app(scope, receive, limited)


def _has_events(start: Message) -> bool:
    """Whether a reply that begins so is a stream of events; those have no length, so in HTTP/1.1 they are chunks."""
    headers = start["headers"]
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
