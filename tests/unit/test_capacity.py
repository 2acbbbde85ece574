"""Rows of a pass: few beside slots that decode, and more where that makes a row cheaper and ends soon."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.engine.core.plan import Capacity


def capacity(batch_size: int = 1024, shared_size: int | None = 128) -> Capacity:
    return Capacity(
        n_slots=4, n_ctx=4096, batch_size=batch_size, shared_size=shared_size, eos_ids=frozenset()
    )


def machine(read_s: float, row_s: float) -> Callable[[int], float]:
    """A pass reads the weights, and computes its rows."""
    return lambda n_rows: read_s + n_rows * row_s


@pytest.mark.parametrize(
    ("read_s", "row_s", "n_rows"),
    [
        (0.1, 0.0001, 1024),  # reading is most of it
        (0.1, 0.0015, 512),  # 512 rows are over in 0.87 s, and 1,024 hardly cheaper
        (0.01, 0.002, 128),  # rows are all of it
        (2.0, 0.001, 512),  # 1,024 rows would take more than three seconds
        (4.0, 0.001, 128),  # so would 256
    ],
)
def test_prompts_alone_have_long_passes_where_these_pay(read_s: float, row_s: float, n_rows: int) -> None:
    assert capacity().budget(machine(read_s, row_s), is_shared=False) == n_rows


def test_a_pass_in_which_slots_decode_is_short() -> None:
    assert capacity().budget(machine(0.1, 0.0001), is_shared=True) == 128


def test_no_pass_has_more_rows_than_there_may_be() -> None:
    fast = machine(0.1, 0.0)
    assert capacity(batch_size=300).budget(fast, is_shared=False) == 256
    for is_shared in (False, True):
        assert capacity(batch_size=100, shared_size=None).budget(fast, is_shared=is_shared) == 100
