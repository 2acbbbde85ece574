"""Bytes on the socket that are no good HTTP, or only half of it: refused or waited for, and nobody else notices."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from tests.http.serving import PATIENCE_S, Served, raw, until

CANARY = b"qzCanary"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GOOD = b'{"prompt": "a", "max_tokens": 1}'


def serves(server: Served) -> None:
    """The next good request is answered."""
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
    until(lambda: not server.engine.running)


@contextmanager
def connected(server: Served, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        yield connection


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + CANARY, id="TLS"),
        pytest.param(CANARY + b"\r\n\r\n", id="no request line"),
        pytest.param(b"GET /health\r\n\r\n", id="no version"),
        pytest.param(b"GET /health HTTP/3.7\r\nhost: a\r\n\r\n", id="odd version"),
        pytest.param(b"GET /he alth HTTP/1.1\r\nhost: a\r\n\r\n", id="space in the path"),
        pytest.param(b"GET /health HTTP/1.1\r\n\r\n", id="no host"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", id="two hosts"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: a\r\n" + CANARY + b"\r\n\r\n", id="no colon"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\x00b\r\n\r\n", id="NUL in a header"),
        pytest.param(HEAD + b"content-length: -5\r\n\r\n" + GOOD, id="negative length"),
        pytest.param(HEAD + b"content-length: 5x\r\n\r\n" + GOOD, id="no number"),
        pytest.param(HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + GOOD, id="two lengths"),
        pytest.param(HEAD + b"transfer-encoding: gzip\r\n\r\n" + GOOD, id="unknown encoding"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + GOOD, id="no chunk size"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n" + GOOD, id="negative chunk size"),
        pytest.param(
            HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n", id="huge chunk size"
        ),
        pytest.param(HEAD + b"x: " + b"a" * 1_000_000 + b"\r\n\r\n", id="long header"),
        pytest.param(HEAD + b"".join(b"x%d: a\r\n" % i for i in range(50_000)) + b"\r\n", id="many headers"),
        pytest.param(b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", id="long path"),
    ],
)
def test_no_good_http(server: Served, data: bytes) -> None:
    answer = raw(server.port, data, first_s=0.3)
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert CANARY not in answer
    assert b"Traceback" not in answer
    assert not server.engine.requests
    serves(server)


def test_two_ways_to_tell_a_length(server: Served) -> None:
    """It is refused, and the connection's rest is not taken for another request."""
    smuggled = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    lengths = b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n"
    answer = raw(server.port, HEAD + lengths + chunks + smuggled)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()
    serves(server)


def test_a_body_without_end(server: Served) -> None:
    """Chunks that never end hold no slot and nobody up, as often as they come; leaving them leaves nothing."""
    with ExitStack() as left:
        for _ in range(40):
            left.enter_context(connected(server, HEAD + b'transfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\n'))
        for _ in range(3):
            serves(server)
        assert len(server.engine.requests) == 3
    serves(server)


@pytest.mark.parametrize("sent", [HEAD[:30], HEAD, HEAD + b"content-length: 500\r\n\r\n" + GOOD])
def test_half_a_request(server: Served, sent: bytes) -> None:
    with connected(server, sent):
        serves(server)
    serves(server)
    assert len(server.engine.requests) == 2


def test_a_body_in_small_pieces_is_read(server: Served) -> None:
    with connected(server, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n") as connection:
        for i in range(len(GOOD)):
            connection.sendall(b"1\r\n%s\r\n" % GOOD[i : i + 1])
        connection.sendall(b"0\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "w0 "


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("authorization", "Bearer " + "x" * 60_000),
        ("x-request-id", "qzCanary\x1b[31m" + "x" * 60_000),
        ("accept", "x" * 60_000),
        ("traceparent", "qzCanary"),
        ("content-encoding", "gzip"),
        ("expect", "100-continue"),
    ],
)
def test_headers_that_say_nothing_to_us(server: Served, name: str, value: str) -> None:
    answer = raw(
        server.port,
        HEAD
        + b"connection: close\r\n%s: %s\r\ncontent-length: %d\r\n\r\n"
        % (name.encode(), value.encode(), len(GOOD))
        + GOOD,
    )
    assert CANARY not in answer
    *early, head = answer.partition(b"\r\n\r\n")[0].split(b"HTTP/1.1 ")
    assert head[:3] in (b"200", b"100", b"400", b"431"), head
    assert early in ([b""], [b"", b"100 Continue\r\n\r\n"])
    serves(server)


# --- the size of a request's head ---

HEAD_LIMIT = 1 << 16


def head_of(n_bytes: int, filler: bytes = b"a") -> bytes:
    """A request's line and headers, `n_bytes` long with the empty line at their end."""
    start, end = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-filler: ", b"b\r\n\r\n"
    return start + filler * (n_bytes - len(start) - len(end)) + end


def answers_to(server: Served, pieces: Sequence[bytes], n_answers: int) -> bytes:
    """What the server answers to pieces that it reads one after the other."""
    with connected(server, b"") as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.005)
        answer = b""
        while answer.count(b"HTTP/1.1 ") < n_answers or not answer.endswith(b"}"):
            answer += connection.recv(65536) or pytest.fail(f"closed after {answer[:200]!r}")
        return answer


@pytest.mark.parametrize("piece", [1 << 20, 9973], ids=["at once", "in pieces"])
@pytest.mark.parametrize("filler", [b"a", b" "])
@pytest.mark.parametrize("n_before", [0, 2])
def test_a_head_is_at_most_64_kib(server: Served, piece: int, filler: bytes, n_before: int) -> None:
    """To the byte: in one read or in several, blanks included, also behind other requests of the same read."""
    for n_bytes, status in ((HEAD_LIMIT, b"200"), (HEAD_LIMIT + 1, b"431")):
        data = head_of(200) * n_before + head_of(n_bytes, filler)
        pieces = [data[start : start + piece] for start in range(0, len(data), piece)]
        answer = answers_to(server, pieces, n_before + 1)
        last = answer.split(b"HTTP/1.1 ")[-1]
        assert last.startswith(status), last[:200]
    error = json.loads(last.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "headers_too_large")
    assert "65536 bytes" in error["message"]
    assert b"connection: close" in last.lower()
    serves(server)


def test_a_body_is_no_head(server: Served) -> None:
    """Its bytes do not count, whether they come with the head or after it."""
    body = json.dumps({"content": "a" * (2 * HEAD_LIMIT)}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    data = head + b"content-length: %d\r\n\r\n" % len(body) + body
    for pieces in ([data], [data[:100], data[100:]]):
        assert answers_to(server, pieces, 1).startswith(b"HTTP/1.1 200 ")


def test_bytes_after_an_answer_to_a_broken_body(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """What follows an answered request is no HTTP: the connection closes, and nothing is raised."""
    sent = b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with connected(server, sent) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"no chunk\r\n")
        assert connection.recv(65536) == b""
    assert not [one for one in caplog.records if one.exc_info]


def _of_chunks(data: bytes) -> tuple[list[bytes], bytes]:
    """The chunks of a body, and what comes behind its end."""
    chunks = []
    while True:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        chunk, end, data = data[:n], data[n : n + 2], data[n + 2 :]
        assert end == b"\r\n"
        if not n:
            return chunks, data
        chunks.append(chunk)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_the_bytes_of_a_stream(server: Served, version: bytes) -> None:
    """A chunk for each event, and the connection goes on; HTTP/1.0 has neither chunks nor another request."""
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    head = HEAD.replace(b"1.1", version) + b"content-length: %d\r\n\r\n" % len(body)
    last = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = raw(server.port, head + body + last)
    fields, _, rest = answer.partition(b"\r\n\r\n")
    assert fields.startswith(b"HTTP/1.1 200 ")
    if version == b"1.0":
        assert b"transfer-encoding" not in fields.lower()
        assert rest.startswith(b"data: {")
        assert rest.endswith(b"\n\ndata: [DONE]\n\n")
        return
    assert b"transfer-encoding: chunked" in fields.lower()
    chunks, behind = _of_chunks(rest)
    assert len(chunks) == len(list(server.engine.script(server.engine.requests[0]))) + 1
    assert all(one.startswith(b"data: ") and one.endswith(b"\n\n") for one in chunks)
    assert chunks[-1] == b"data: [DONE]\n\n"
    assert behind.startswith(b"HTTP/1.1 200 ")
