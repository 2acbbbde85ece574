"""Messages between ranks: a verb, arguments that JSON can write, and tensors as they lie in memory.

Nothing is unpickled, so what arrives can only be numbers. A message is the length of its header, the header, and each
tensor's bytes, every part from a multiple of 16 bytes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.ranks import as_bytes

_STEP = 16  # bytes; enough for any dtype
_LENGTH = 8  # bytes of the header's length


@dataclass(frozen=True, slots=True)
class Message:
    """What the first rank says to another."""

    verb: str
    arguments: Sequence[Any] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # in host memory

    def encode(self) -> bytes:
        """The message as bytes."""
        listed = [(name, _name(one.dtype), list(one.shape)) for name, one in self.tensors.items()]
        header = json.dumps((self.verb, self.arguments, listed)).encode()
        parts = [len(header).to_bytes(_LENGTH, "little") + header]
        parts += [as_bytes(one).numpy().tobytes() for one in self.tensors.values()]
        return b"".join(part.ljust(_whole(len(part)), b"\0") for part in parts)

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """The opposite. Its tensors lie in memory of their own."""
        memory = bytearray(data)
        end = _LENGTH + int.from_bytes(memory[:_LENGTH], "little")
        verb, arguments, listed = json.loads(memory[_LENGTH:end])
        tensors, start = {}, _whole(end)
        for name, kind, shape in listed:
            dtype, n = getattr(torch, kind), math.prod(shape)
            whole = (
                torch.frombuffer(memory, dtype=dtype, count=n, offset=start)
                if n
                else torch.empty(0, dtype=dtype)
            )
            tensors[name] = whole.view(shape)
            start += _whole(n * dtype.itemsize)
        return cls(verb, arguments, tensors)


def _whole(n_bytes: int) -> int:
    return -(-n_bytes // _STEP) * _STEP


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
