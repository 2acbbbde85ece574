"""Clients that leave or read slowly: their generation is cancelled, others are not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from slipstream.server.http.connection import ClientGone, ReaderLimit
from tests.http.fake import delta, done, words
from tests.http.serving import PATIENCE_S, Served, logged, send, served, until, with_loop


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}])
def test_leaving_cancels_at_once(server: Served, fields: dict[str, object]) -> None:
    server.engine.script = lambda request: [delta("x"), 10 * PATIENCE_S, done(request, 1)]
    wanted = fields.get("n", 1)
    with send(server, **fields):
        until(lambda: len(server.engine.running) == wanted)
        if "stream" in fields:
            until(lambda: len(server.engine.streams) == wanted)
    until(lambda: all(stream.closed for stream in server.engine.streams))
    assert not server.engine.running


def test_leaving_before_the_first_chunk(server: Served) -> None:
    server.engine.script = lambda request: [10 * PATIENCE_S, done(request, 1)]
    for _ in range(20):
        send(server, stream=True).close()
    until(lambda: len(server.engine.streams) == 20 and not server.engine.running)
    assert all(stream.closed for stream in server.engine.streams)


def test_leaving_within_the_body(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "slipstream")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"x-request-id: leaver\r\ncontent-length: 99\r\n\r\n{"
        )

    def mine() -> list[dict[str, Any]]:
        """Lines of requests before this one may come late."""
        return [line for line in logged(caplog, "request") if line.get("request_id") == "leaver"]

    until(mine)
    (line,) = mine()
    assert line["status"] == 499
    assert "unexpected" not in caplog.text


def test_half_closed_clients_still_get_nothing_more(server: Served) -> None:
    """A client that resets in the middle of a long stream frees its slot; the next request is served."""
    server.engine.script = lambda request: words(request, delay_s=0.02)
    with send(server, stream=True) as connection:
        connection.recv(100)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    until(lambda: server.engine.streams[0].closed)
    assert server.chat().status_code == 200


def test_finished_streams_are_let_go(server: Served) -> None:
    server.chat()
    server.events()
    until(lambda: all(stream.closed and stream.ended for stream in server.engine.streams))


def test_a_reader_of_single_bytes() -> None:
    """It takes something all the time, but so little that nothing can be sent."""
    with served(timeout=0.5) as server:
        server.engine.script = lambda request: iter(lambda: delta("x" * 100_000), None)
        with send(server, stream=True) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            until(lambda: server.engine.streams)
            ends = time.monotonic() + PATIENCE_S
            while not server.engine.streams[0].closed:
                connection.recv(1)
                time.sleep(0.02)
                assert time.monotonic() < ends


def test_readers_that_stop_reading(caplog: pytest.LogCaptureFixture) -> None:
    """Fifty of them: little is made ahead for each, others are served meanwhile, and in the end they are cut off."""
    n_made = 0

    def endless(request: object) -> object:
        nonlocal n_made
        while True:
            n_made += 1
            yield delta("x" * 100_000)

    with served(timeout=1.0) as server, contextlib.ExitStack() as held:
        server.engine.script = endless
        for _ in range(50):
            held.enter_context(send(server, stream=True))
        until(lambda: len(server.engine.streams) == 50)
        n_held = -1
        while n_held != n_made:  # until nothing more is made ahead
            n_held = n_made
            time.sleep(0.3)
        server.engine.script = words
        assert server.chat().status_code == 200
        assert n_made < 50 * 60, "the server buffers without limit"
        until(lambda: all(stream.closed for stream in server.engine.streams))
    assert len(logged(caplog, "reader_timeout")) == 50


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_stream_that_never_pauses_ends_with_its_connection(
    size: int, loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It always has more to send at once, so nothing but sending can notice that the client has left."""
    with_loop(loop, monkeypatch)
    n_made, holds, left = 0, threading.Event(), threading.Event()
    most = 2_000

    def endless(request: object) -> Iterator[Any]:
        nonlocal n_made
        while n_made < most:
            n_made += 1
            if n_made == 3:
                yield 0.05  # what came before is sent
                holds.set()
                assert left.wait(5)
            yield delta("x" * size)

    with served() as server:
        server.engine.script = endless
        with send(server, stream=True) as connection:
            assert holds.wait(5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        left.set()
        until(lambda: server.engine.streams[0].closed)
        assert n_made <= 5
        server.engine.script = words
        assert server.chat().status_code == 200
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


async def test_a_reader_that_takes_nothing_of_another_server(caplog: pytest.LogCaptureFixture) -> None:
    """Behind `ReaderLimit` an application hears of it; what is taken in time is no trouble."""
    taken: list[bytes] = []

    async def send(message: Message) -> None:
        if message["body"] == b"late":
            await asyncio.Event().wait()
        taken.append(message["body"])

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        for body in (b"one", b"two", b"late", b"never"):
            await send({"type": "http.response.body", "body": body, "more_body": True})

    with pytest.raises(ClientGone):
        await ReaderLimit(answer, 0.05)({"type": "http"}, receive_nothing, send)
    assert taken == [b"one", b"two"]
    assert len(logged(caplog, "reader_timeout")) == 1


async def receive_nothing() -> Message:
    raise AssertionError
