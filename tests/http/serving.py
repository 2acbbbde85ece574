"""A real server on a free loopback port, in a thread, over a fake engine; and raw access to it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from engine.settings import Settings
from server.gate import Gate
from server.serve import bind, listener
from tests.http.fake import FakeEngine


@dataclass(frozen=True)
class Served:
    """A running server with its engine."""

    url: str
    port: int
    engine: FakeEngine
    gate: Gate
    http: httpx.Client

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

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
def served(engine: FakeEngine | None = None, *, loaded: bool = True, **settings: Any) -> Iterator[Served]:
    """Serve `engine`, or a gate without one if not `loaded`."""
    engine = engine or FakeEngine()
    chosen = Settings(model="fake", port=0, **settings)
    gate = Gate(engine if loaded else None)
    server = listener(gate, chosen)
    port = bind(chosen)
    number = port.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [port]})
    thread.start()
    try:
        name = "[::1]" if chosen.host == "::1" else "127.0.0.1"
        with httpx.Client(base_url=f"http://{name}:{number}", timeout=10) as http:
            yield Served(f"http://{name}:{number}", number, engine, gate, http)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def until(true: Callable[[], Any], within_s: float = 5.0) -> None:
    """Wait for something another thread does."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def raw(port: int, data: bytes, *, silence_s: float = 0.5) -> bytes:
    """Send bytes as they are; everything the server answers until it closes or is silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=silence_s) as connection:
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        return answer
