"""A cache's memory is zero, writable, aligned, and resident only where it was written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from slipstream.engine.cache.memory import zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (1025, 4, 64, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_memory_is_zero_and_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = zeros(shape, dtype, CPU)
    assert made.shape == shape
    assert made.dtype is dtype
    assert made.is_contiguous()
    assert not made.view(torch.uint8).any()
    assert made.data_ptr() % 64 == 0
    if len(made):
        made[-1] = 1
        assert made[-1].float().min() == 1
        assert not made[:-1].view(torch.uint8).any()


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_memory_becomes_resident_when_it_is_written() -> None:
    before, size = resident_bytes(), 512 * 2**20
    made = zeros((256, size // 256), torch.uint8, CPU)
    assert resident_bytes() - before < size // 8
    made[:128] = 1
    grown = resident_bytes() - before
    assert size // 4 < grown < 3 * size // 4
