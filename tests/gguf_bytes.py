"""GGUF headers byte by byte, valid ones and others, and where the fields of a file lie.

The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ALIGNMENT = 32
# Types of values -> how `struct` calls them.
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
U8, U32, BOOL, F32 = 0, 4, 7, 6  # of values
PLAIN_F32 = 0  # of tensors


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: Any) -> bytes:
    """A key with a single value."""
    return string(name) + struct.pack("<I", kind) + single(kind, value)


def single(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack(f"<{CODES[kind]}", value)


def array(name: str, kind: int, values: Sequence[Any], count: int | None = None) -> bytes:
    """A key with an array. count: what the file says of its length, if that is not true."""
    head = struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count)
    return string(name) + head + b"".join(single(kind, one) for one in values)


def info(name: str | bytes, shape: Sequence[int], kind: int = PLAIN_F32, offset: int = 0) -> bytes:
    """A tensor; shape: its last dimension last, as torch has it."""
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def file(
    keys: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    alignment: int = ALIGNMENT,
    **said: Any,
) -> bytes:
    """A whole file. said: another `magic`, `version`, `n_tensors` or `n_keys` than the true one."""
    numbers = struct.pack(
        "<IQQ", said.get("version", 3), said.get("n_tensors", len(infos)), said.get("n_keys", len(keys))
    )
    head = said.get("magic", b"GGUF") + numbers + b"".join([*keys, *infos])
    padding = -len(head) % alignment if infos else 0
    return head + bytes(padding) + data


class Place(NamedTuple):
    """A field of a file."""

    what: str  # "length", "count", "type", "value", "dimension", "offset", …
    start: int
    n_bytes: int


def places(data: bytes) -> list[Place]:
    """The fields of a valid file's header, in order."""
    return list(_Walk(data).fields())


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def fields(self) -> Iterator[Place]:
        yield self.step("magic", 4)
        yield self.step("version", 4)
        n_tensors = self.number(tensors := self.step("n_tensors", 8))
        yield tensors
        yield (keys := self.step("n_keys", 8))
        for _ in range(self.number(keys)):
            yield from self.text("key")
            yield (kind := self.step("type", 4))
            yield from self.value(self.number(kind))
        for _ in range(n_tensors):
            yield from self.text("name")
            yield (n_dims := self.step("n_dims", 4))
            for _ in range(self.number(n_dims)):
                yield self.step("dimension", 8)
            yield self.step("tensor type", 4)
            yield self.step("offset", 8)

    def value(self, kind: int) -> Iterator[Place]:
        if kind == STRING:
            yield from self.text("value")
        elif kind == ARRAY:
            yield (inner := self.step("element type", 4))
            yield (count := self.step("count", 8))
            for _ in range(self.number(count)):
                yield from self.value(self.number(inner))
        else:
            yield self.step("value", struct.calcsize(f"<{CODES[kind]}"))

    def text(self, what: str) -> Iterator[Place]:
        yield (length := self.step(f"{what} length", 8))
        yield self.step(what, self.number(length))

    def step(self, what: str, n_bytes: int) -> Place:
        self.at += n_bytes
        return Place(what, self.at - n_bytes, n_bytes)

    def number(self, place: Place) -> int:
        return int.from_bytes(self.data[place.start : place.start + place.n_bytes], "little")
