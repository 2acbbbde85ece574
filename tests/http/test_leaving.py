"""Clients that leave or read slowly: their generation is cancelled, others are not disturbed."""

from __future__ import annotations

import json
import socket
import time

import pytest

from server import sse
from tests.http.fake import delta, done, words
from tests.http.serving import Served, chat, until


def send(server: Served, **fields: object) -> socket.socket:
    """A connection on which a chat request has been sent."""
    body = json.dumps(chat(**fields)).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    return connection


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}])
def test_leaving_cancels_at_once(server: Served, fields: dict[str, object]) -> None:
    server.engine.script = lambda request: [delta("x"), 30.0, done(request, 1)]
    wanted = fields.get("n", 1)
    with send(server, **fields):
        until(lambda: len(server.engine.running) == wanted)
        if "stream" in fields:
            until(lambda: len(server.engine.streams) == wanted)
    started = time.monotonic()
    until(lambda: all(stream.closed for stream in server.engine.streams), within_s=2)
    assert time.monotonic() - started < 0.5
    assert not server.engine.running


def test_leaving_before_the_first_chunk(server: Served) -> None:
    server.engine.script = lambda request: [30.0, done(request, 1)]
    for _ in range(20):
        send(server, stream=True).close()
    until(lambda: len(server.engine.streams) == 20 and not server.engine.running, within_s=3)
    assert all(stream.closed for stream in server.engine.streams)


def test_leaving_within_the_body(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "server")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 99\r\n\r\n{"
        )
    until(lambda: "status=499" in caplog.text)
    assert "unexpected" not in caplog.text


def test_half_closed_clients_still_get_nothing_more(server: Served) -> None:
    """A client that resets in the middle of a long stream frees its slot; the next request is served."""
    server.engine.script = lambda request: words(request, delay_s=0.02)
    with send(server, stream=True) as connection:
        connection.recv(100)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    until(lambda: server.engine.streams[0].closed, within_s=1)
    assert server.chat().status_code == 200


def test_finished_streams_are_let_go(server: Served) -> None:
    server.chat()
    server.events()
    until(lambda: all(stream.closed and stream.ended for stream in server.engine.streams))


def test_a_reader_that_stops_reading(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SEND_TIMEOUT_S", 0.3)
    n_made = 0

    def endless(request: object) -> object:
        nonlocal n_made
        while True:
            n_made += 1
            yield delta("x" * 100_000)

    server.engine.script = endless
    with send(server, stream=True):
        until(lambda: n_made > 1)
        time.sleep(0.2)
        held = n_made
        server.engine.script = words
        assert server.chat().status_code == 200
        assert n_made <= held + 1, "the server buffers without limit"
        until(lambda: server.engine.streams[0].closed, within_s=3)
