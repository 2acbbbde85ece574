"""Messages between ranks: a verb, arguments that JSON can write, and tensors as they lie in memory.

Nothing is unpickled, so what arrives can only be numbers. A message is the length of its header, the header, and each
tensor's bytes, every part from a multiple of 16 bytes on. Every pass waits for one with a dozen small tensors, and what
is done to each of those is what it costs: no call more than numpy needs to write it and to read it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_STEP = 16  # bytes; enough for any dtype
_LENGTH = 8  # bytes of the header's length
# Numbers travel as integers of their size: numpy does not know all dtypes.
_SIZES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CARRIERS = {
    one: _SIZES[one.itemsize]
    for one in vars(torch).values()
    if isinstance(one, torch.dtype) and one.itemsize in _SIZES
}
_NAMES = {one: str(one).removeprefix("torch.") for one in _CARRIERS}
_KINDS = {  # name -> the dtype, whether it is its own carrier, the carrier as numpy calls it
    name: (one, _CARRIERS[one] is one, torch.empty(0, dtype=_CARRIERS[one]).numpy().dtype)
    for one, name in _NAMES.items()
}


@dataclass(frozen=True, slots=True)
class Message:
    """What the first rank says to another."""

    verb: str
    arguments: Sequence[Any] = ()
    tensors: Sequence[Tensor] = ()  # in host memory

    def encode(self) -> bytes:
        """The message as bytes."""
        listed = [(_NAMES[one.dtype], *one.shape) for one in self.tensors]
        header = json.dumps((self.verb, self.arguments, listed)).encode()
        parts = [len(header).to_bytes(_LENGTH, "little") + header]
        for one in self.tensors:
            carrier = _CARRIERS[one.dtype]
            parts.append((one if one.dtype is carrier else one.view(carrier)).numpy().tobytes())
        return b"".join([part + bytes(-len(part) % _STEP) for part in parts])

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """The opposite. Its tensors lie in memory of their own."""
        end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        verb, arguments, listed = json.loads(data[_LENGTH:end])
        memory, tensors = bytearray(data), list[Tensor]()
        for name, *shape in listed:
            end += -end % _STEP
            dtype, is_plain, carrier = _KINDS[name]
            array = np.ndarray(shape, carrier, memory, end)
            tensor = torch.from_numpy(array)
            tensors.append(tensor if is_plain else tensor.view(dtype))
            end += array.nbytes
        return cls(verb, arguments, tensors)
