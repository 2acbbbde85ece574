"""Kernels whose rows threads share: every row once, whatever the threads; failures and recordings are those of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.kernels import row_kernel
from slipstream.kernels.compiled import long_pointer
from slipstream.kernels.lent_memory import LentMemory
from slipstream.kernels.row_kernel import AT_ONCE, MANY, RowKernel
from slipstream.kernels.tape import recorder_of

BAD_ROW = -1  # of `_count`: what it refuses


@RowKernel
def _count(addresses: Any, step: float, skipped: Any, span: Any) -> None:
    """Add a step to the count of each row, [n_rows] int64. addresses: of the counts, of a row it fails at."""
    counts, bad = long_pointer(addresses[0]), long_pointer(addresses[1])[0]
    for row in range(span[0], span[1]):
        if row == bad:
            raise ValueError
        if skipped is None or row != skipped:
            counts[row] += np.int64(step)


def count(counts: torch.Tensor, skipped: int | None = None, bad: int = BAD_ROW) -> None:
    failing = torch.tensor([bad])
    _count((counts.data_ptr(), failing.data_ptr()), 3.0, skipped, (0, len(counts)))


@pytest.fixture(params=[1, 2, 5], ids="{}-threads".format)
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("n_rows", [0, 1, MANY - 1, MANY, MANY + 1, 5 * AT_ONCE, 10 * AT_ONCE + 7, 1000])
def test_each_row_is_done_once(n_rows: int, n_threads: int) -> None:
    counts = torch.zeros(n_rows, dtype=torch.int64)
    count(counts)
    assert counts.tolist() == [3] * n_rows


def test_arguments_are_those_of_the_call(n_threads: int) -> None:
    """None and a number are different arguments, each compiled and entered as its own."""
    counts = torch.zeros(100, dtype=torch.int64)
    for skipped in (None, 70, None, 7):
        count(counts, skipped)
    assert counts[[70, 7]].tolist() == [9, 9]
    assert counts.sum() == 3 * (4 * 100 - 2)


def test_threads_share_many_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[tuple[int, int]] = []
    share = row_kernel._share

    def spy(*args: Any) -> bool:
        shared.append((args[3][1], args[5]))
        return bool(share(*args))

    monkeypatch.setattr(row_kernel, "_share", spy)
    before = torch.get_num_threads()
    try:
        for threads, n_rows in ((1, 1000), (4, MANY - 1), (4, MANY), (100, 100)):
            torch.set_num_threads(threads)
            count(torch.zeros(n_rows, dtype=torch.int64))
    finally:
        torch.set_num_threads(before)
    assert shared == [(MANY, 4), (100, 100 // AT_ONCE)]


def test_a_failing_thread_fails_the_call(n_threads: int) -> None:
    counts = torch.zeros(200, dtype=torch.int64)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        count(counts, bad=150)
    assert n_threads == 1 or "_count" in str(refused.value)
    assert counts[:AT_ONCE].tolist() == [3] * AT_ONCE
    assert counts[150] == 0


def test_a_recorded_call_is_made_again_with_all_rows(n_threads: int) -> None:
    counts = torch.zeros(200, dtype=torch.int64)
    failing = torch.tensor([BAD_ROW])
    addresses = counts.data_ptr(), failing.data_ptr()
    replay = recorder_of(LentMemory())(lambda: _count(addresses, 3.0, None, (0, 200)))
    replay()
    assert counts.tolist() == [6] * 200
