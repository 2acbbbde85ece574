"""How passes are measured before the first request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slipstream.engine.core.warm import seconds_by_width

WIDTHS = (1, 2, 4, 8, 16, 32)


class Machine:
    """Passes of 1 s and 0.1 s a row; `dear`: further seconds of the passes of some rows, in turn."""

    def __init__(self, dear: dict[int, list[float]] | None = None) -> None:
        self.dear = dear or {}
        self.ran: list[int] = []

    def __call__(self, n_rows: int) -> float:
        self.ran.append(n_rows)
        extra = self.dear.get(n_rows)
        return self.usual(n_rows) + (extra.pop(0) if extra else 0.0)

    @staticmethod
    def usual(n_rows: int) -> float:
        return 1.0 + 0.1 * n_rows


def usual(widths: Sequence[int]) -> dict[int, float]:
    return {n_rows: pytest.approx(Machine.usual(n_rows)) for n_rows in widths}


def test_every_width_is_measured_while_there_is_time() -> None:
    machine = Machine()
    assert seconds_by_width(WIDTHS, machine, enough_s=100.0) == usual(WIDTHS)
    assert {machine.ran.count(n_rows) for n_rows in WIDTHS[1:]} == {machine.ran.count(1) - 1}
    assert machine.ran.count(32) > 2


def test_what_is_compiled_at_first_use_is_no_cost_of_a_width() -> None:
    machine = Machine({1: [9.0], 4: [30.0], 16: [5.0]})
    assert seconds_by_width(WIDTHS, machine, enough_s=1e-9)[4] == pytest.approx(1.4)
    assert machine.ran == [1, 1, 2, 4, 4, 8]
    assert seconds_by_width(WIDTHS, machine, enough_s=20.0) == usual(WIDTHS)


def test_a_busy_neighbour_in_one_turn_leaves_no_trace() -> None:
    machine = Machine({n_rows: [0.5] for n_rows in WIDTHS})
    assert seconds_by_width(WIDTHS, machine, enough_s=20.0) == usual(WIDTHS)


def test_a_large_model_is_measured_up_to_eight_rows_and_the_rest_follows_the_line() -> None:
    machine = Machine()
    assert seconds_by_width(WIDTHS, machine, enough_s=0.0) == usual(WIDTHS)
    assert max(machine.ran) == 8
    assert len(machine.ran) == 5


def test_where_time_is_short_powers_of_two_are_measured_and_the_rest_lies_between_them() -> None:
    def bent(n_rows: int) -> float:
        ran.append(n_rows)
        return 1.0 if n_rows <= 16 else n_rows / 16

    ran: list[int] = []
    widths = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    measured = seconds_by_width(widths, bent, enough_s=4.5)
    assert ran == [1, 1, 2, 4, 8, 12, 16, 32, 64]
    assert (measured[24], measured[48]) == (1.5, 3.0)


def test_wider_passes_are_never_expected_to_take_less() -> None:
    falling = {1: 2.0, 2: 1.0, 4: 0.9, 8: 0.8}
    assert seconds_by_width(WIDTHS, falling.__getitem__, enough_s=0.0)[32] == 0.8


def test_rows_that_look_dearer_together_get_more_turns() -> None:
    sane, odd = Machine(), Machine({8: [8.0] * 40})
    for machine in (sane, odd):
        seconds_by_width(WIDTHS[:4], machine, enough_s=20.0)
    assert sane.ran.count(8) < 6 < odd.ran.count(8)


def test_no_width_and_a_single_width_are_measured_too() -> None:
    assert seconds_by_width((), Machine(), enough_s=0.0) == {}
    assert seconds_by_width((1,), Machine(), enough_s=0.0) == usual((1,))
