"""Memory of a cache that costs nothing until it is written."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_LEAST = 2**21  # bytes worth a mapping; a huge page


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor, `shape`. On a CPU it lies in a mapping of its own, in huge pages where the system has them.

    The system hands out such memory when it is first written, so a start does not wait for gigabytes to be cleared, and
    what no sequence has used is not resident.
    """
    n_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or n_bytes < _LEAST:
        return torch.zeros(*shape, dtype=dtype, device=device)
    # Private: shared memory would count as another kind, and a child process could write to it.
    # It is freed with the last tensor that looks into it.
    memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
