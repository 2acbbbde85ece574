"""Memory that recorded operations use again and again, at addresses that never change.

What a recording works with is needed only while it, or a replay of it, runs, and only one of them runs at a time. So
memory is lent to a tensor for as long as the recording holds it, and lent again, to later tensors of this recording
and of others; it never goes back to the allocator. Its sizes are powers of two, so that passes of many widths use the
same; what no tensor needs of a block is memory that is never touched.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

_LEAST = 64  # bytes


class _Lent(np.ndarray):  # type: ignore[type-arg]
    """A view of a block that can be watched; it lives as long as the storage of the tensor made of it."""


class LentMemory:
    """Blocks of bytes, by size; not for several threads at a time."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._lent: dict[int, Tensor] = {}  # by address: blocks [n_bytes] uint8

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor laid out like the other, which has a storage of its own; not filled."""
        size = max(_LEAST, 1 << (tensor.untyped_storage().nbytes() - 1).bit_length())
        free = self._free[size]
        block = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        address = block.data_ptr()
        self._lent[address] = block
        view = block.numpy().view(_Lent)
        weakref.finalize(view, self._take_back, size, address).atexit = False
        return _shaped(torch.from_numpy(view), tensor, 0)

    def _take_back(self, size: int, address: int) -> None:
        self._free[size].append(self._lent.pop(address))

    def alias(self, tensor: Tensor) -> Tensor:
        """The same bytes without a claim on them, if they are lent; else the tensor."""
        block = self._lent.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        return tensor if block is None else _shaped(block, tensor, tensor.storage_offset())


def _shaped(block: Tensor, like: Tensor, offset: int) -> Tensor:
    """A block's bytes from an element on, laid out like the other tensor. block: [n_bytes] uint8."""
    return block.view(like.dtype).as_strided(like.shape, like.stride(), offset)
