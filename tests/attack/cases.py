"""The attacks, by name. Each is what one caller does again and again; four of them run at once.

A case is a function of a `Target` that makes a coroutine; what the server answered is counted in the target.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from slipstream.server.http.limits import TEXT_MIB
from tests.attack.neighbour import ATTACKER

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LARGEST = (TEXT_MIB << 20) - 1024  # bytes of filling in the largest body that is read
CODE = b"def add(a, b):\\n    return a + b  # sum of both\\n"


@dataclass(slots=True)
class Target:
    """The server under attack, and how often it answered what: by status, or `cut` where it closed the connection."""

    url: str
    answers: Counter[str] = field(default_factory=Counter)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = urlsplit(self.url)
        return await asyncio.open_connection(where.hostname, where.port)

    async def send(self, path: str, body: bytes) -> None:
        """Post a body and read the answer to its end."""
        reader, writer = await self.connect()
        status = "cut"
        try:
            writer.write(request(path, body))
            status = (await reader.readline()).decode().split(" ")[1]
            await reader.read()
        except (ConnectionError, IndexError):
            pass  # refused before the body was read
        finally:
            self.answers[status] += 1
            writer.close()


def request(path: str, body: bytes, *, close: bool = True) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {ATTACKER}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n" + "connection: close\r\n" * close
    )
    return head.encode() + b"\r\n" + body


def filled(start: bytes, piece: bytes, end: bytes, n_bytes: int = LARGEST) -> bytes:
    """JSON of about `n_bytes`: `piece` again and again between `start` and `end`."""
    return start + piece * ((n_bytes - len(start) - len(end)) // len(piece)) + end


Attack = Callable[[Target], Awaitable[None]]


def large(path: str, start: bytes, piece: bytes, end: bytes, n_bytes: int = LARGEST) -> Attack:
    """Post one large body."""
    body: list[bytes] = []

    async def attack(target: Target) -> None:
        if not body:
            body.append(filled(start, piece, end, n_bytes))
        await target.send(path, body[0])

    return attack


def unread(path: str, fields: dict[str, Any], n_requests: int = 1) -> Attack:
    """Ask for long replies, one behind the other on one connection, and read nothing until the server cuts it."""

    async def attack(target: Target) -> None:
        reader, writer = await target.connect()
        body = json.dumps(fields).encode()
        asked, last = request(path, body, close=False), request(path, body)
        if not fields:
            asked = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {ATTACKER}\r\n\r\n".encode()
            last = asked.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        try:
            # The connection is closed behind the last one, if that is ever answered.
            writer.write(asked * (n_requests - 1) + last)
            await asyncio.sleep(8)  # longer than the server's --timeout
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            while await reader.read(1 << 20):
                pass
        except ConnectionError:
            target.answers["cut"] += 1
        else:
            target.answers["whole"] += 1
        finally:
            writer.close()

    return attack


_MESSAGE = b'{"max_tokens":4,"messages":[{"role":"user","content":"'
_CALL = (
    b'{"max_tokens":4,"messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":'
    b'[{"id":"1","function":{"name":"f","arguments":"'
)
_CALL_END = b'"}}]},{"role":"tool","tool_call_id":"1","content":"x"}]}'
CASES: dict[str, Attack] = {
    "16 MiB of chat": large(CHAT, _MESSAGE, CODE, b'"}]}', 16 << 20),
    "chat": large(CHAT, _MESSAGE, CODE, b'"}]}'),
    "chat of control tokens": large(CHAT, _MESSAGE, b"<|im_start|>", b'"}]}'),
    "tool arguments": large(CHAT, _CALL + b'{\\"a\\":\\"', b"words and ", b'\\"}' + _CALL_END),
    "tool arguments, nested": large(CHAT, _CALL + b'{\\"a\\":[0', b",[]", b"]}" + _CALL_END),
    "tool arguments of numbers": large(CHAT, _CALL + b'{\\"a\\":[0', b",5e9", b"]}" + _CALL_END),
    "prediction": large(
        TEXT, b'{"prompt":"x","max_tokens":4,"prediction":{"type":"content","content":"', CODE, b'"}}'
    ),
    "prompt of 1 MiB": large(TEXT, b'{"max_tokens":4,"prompt":"', CODE, b'"}', 1 << 20),
    "unknown fields": large(TEXT, b'{"prompt":"x","max_tokens":4,"other":[0', b',{"a":{"b":[1]}}', b"]}"),
    "metadata": large(TEXT, b'{"prompt":"x","max_tokens":4,"metadata":[0', b',{"a":1}', b"]}"),
    "lists": large(TEXT, b'{"prompt":"x","max_tokens":4,"other":[0', b",[]", b"]}"),
    "a text of colons": large(TEXT, b'{"max_tokens":4,"prompt":"', b'\\":', b'"}'),
    "a text of escapes": large(TEXT, b'{"max_tokens":4,"prompt":"a:b', b"\\n", b'"}'),
    "token ids": large(TEXT, b'{"max_tokens":4,"prompt":[7', b",7", b"]}"),
    "/tokenize": large("/tokenize", b'{"content":"', CODE, b'"}'),
    "/tokenize of 256 KiB": large("/tokenize", b'{"content":"', CODE, b'"}', 1 << 18),
    "/detokenize": large("/detokenize", b'{"tokens":[999', b",999", b"]}"),
    "/apply-template": large("/apply-template", _MESSAGE, CODE, b'"}]}'),
    "unread replies": unread("/detokenize", {"tokens": [999] * 60_000}, 24),
    "unread /props": unread("/props", {}, 2000),
}
