"""A real server on a free loopback port, in a thread, over a fake engine; and raw access to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn.server

from slipstream.engine.settings import Settings
from slipstream.server.command.serve import Listener, listener
from slipstream.server.http.address import bind
from slipstream.server.http.gate import Gate
from slipstream.server.http.limits import unix_path
from slipstream.server.report.tracing import Tracing
from tests.http.document import held
from tests.http.fake import FakeEngine


class Hurried:
    """asyncio for uvicorn's server, which sleeps 0.1 s before it looks whether to end, and as long at its end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = Hurried()  # type: ignore[assignment]


@dataclass(frozen=True)
class Served:
    """A running server with its engine."""

    url: str
    port: int
    engine: FakeEngine
    gate: Gate
    http: httpx.Client
    traces: Tracing | None = None

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return held(self.http.post(path, json=body, **more))

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat(**fields))

    def error(self, status: int, **fields: Any) -> dict[str, Any]:
        """The error object of a chat request that must be refused with `status`."""
        answer = self.chat(**fields)
        assert answer.status_code == status, (answer.status_code, answer.text)
        assert list(answer.json()) == ["error"]
        return answer.json()["error"]

    def events(self, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed reply, which must end in `[DONE]`."""
        body = {**(chat() if "chat" in path else {"prompt": "a b"}), "stream": True, **fields}
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        *chunks, last = [one.removeprefix("data: ") for one in answer.text.split("\n\n") if one]
        assert last == "[DONE]"
        return [json.loads(one) for one in chunks]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi there"}], **fields}


@contextlib.contextmanager
def served(
    engine: FakeEngine | None = None,
    *,
    loaded: bool = True,
    trusted: ssl.SSLContext | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Serve `engine`, or a gate without one if not `loaded`. `trusted`: what a client trusts, for https."""
    engine = engine or FakeEngine()
    chosen = Settings(model="fake", port=0, **settings)
    gate = Gate(engine if loaded else None)
    server = listener(gate, chosen)
    port = bind(chosen)
    path = unix_path(chosen.host)
    number = 0 if path else port.getsockname()[1]
    name = "[::1]" if chosen.host == "::1" else "127.0.0.1"
    # The tests' certificate is for `localhost`.
    address = f"https://localhost:{number}" if chosen.ssl_cert_file else f"http://{name}:{number}"
    transport = httpx.HTTPTransport(uds=path) if path else None
    thread = threading.Thread(target=server.run, kwargs={"sockets": [port]})
    thread.start()
    try:
        with httpx.Client(base_url=address, timeout=10, transport=transport, verify=trusted or True) as http:
            yield Served(address, number, engine, gate, http, server.traces)
    finally:
        server.should_exit = True
        thread.join(10)
        if server.traces:
            server.traces.close()
        assert not thread.is_alive()


def with_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers run on this module's event loop: asyncio's where uvloop is not installed."""

    def run(one: Listener, sockets: list[socket.socket]) -> None:
        with asyncio.Runner(loop_factory=pytest.importorskip(name).new_event_loop) as runner:
            runner.run(one.serve(sockets))

    monkeypatch.setattr(Listener, "run", run)


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The server's log events of one name, by their fields."""
    told = [one.msg for one in caplog.records if isinstance(one.msg, dict)]
    return [one for one in told if one["event"] == event]


PATIENCE_S = 60.0  # for what happens at once on a machine with nothing else to do


def until(true: Callable[[], Any]) -> None:
    """Wait for something another thread does."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def send(server: Served, **fields: object) -> socket.socket:
    """A connection on which a chat request has been sent."""
    body = json.dumps(chat(**fields)).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    return connection


def raw(port: int, data: bytes, *, first_s: float = 60) -> bytes:
    """Send bytes as they are; everything the server answers until it closes, or, if not asked to, is silent.

    first_s: how long to wait for the first of it.
    """
    silence_s = 60 if b"connection: close" in data.lower() else 0.5
    with socket.create_connection(("127.0.0.1", port), timeout=first_s) as connection:
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
                connection.settimeout(silence_s)
        return answer
