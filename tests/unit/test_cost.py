"""What passes and drafts are reckoned to cost, on machines that are disturbed, slow down or recover."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from slipstream.engine.speculate.decide.cost import WIDTHS, Costs
from slipstream.engine.speculate.decide.value import Floats, Lengths, Pass
from slipstream.engine.speculate.drafter import Call

ONE = Pass(1, 1)
SURE, UNSURE = (np.cumprod(np.full(15, right)) for right in (0.99, 0.3))


def true_s(n_rows: int) -> float:
    """A machine on which a pass of 16 rows takes 1.6 times as long as one of a single row."""
    return 0.6e-3 * (1.0 + 0.04 * (n_rows - 1))


def measured() -> Lengths:
    lengths = Lengths(adaptive=True)
    for n_rows in WIDTHS:
        lengths.costs.passed(n_rows, true_s(n_rows))
    return lengths


def serve(
    lengths: Lengths, n_passes: int, seconds: Callable[[int], float] = true_s, draft: Floats = SURE
) -> list[int]:
    """Passes of a slot whose drafts are nearly sure, if nothing else is said; returns how long the drafts were."""
    chosen = []
    for _ in range(n_passes):
        (n,) = lengths.trim([draft], ONE)
        lengths.costs.passed(1 + n, seconds(1 + n))
        chosen.append(n)
    return chosen


def rate(chosen: list[int]) -> float:
    """Tokens a second, beside the most that can be had."""

    def of(lengths: list[int]) -> float:
        return float(sum(1 + SURE[:n].sum() for n in lengths) / sum(true_s(1 + n) for n in lengths))

    return of(chosen) / of([15])


def test_costs_are_linear_between_widths_and_beyond() -> None:
    costs = Costs()
    assert costs.at(5) == pytest.approx(1.1), "nothing is known yet"
    costs.passed(1, 1.0)
    costs.passed(8, 2.4)
    assert costs.at(1) == 1.0
    assert costs.at(16) == pytest.approx(4.0)
    for n_rows in (1, 4, 8, 9, 40):
        assert costs(np.array([n_rows]))[0] == pytest.approx(costs.at(n_rows))
    assert costs.at(4) == pytest.approx(1.6)


def test_one_slow_pass_is_a_hiccup_and_two_are_a_change() -> None:
    costs = measured().costs
    for n_rows in (1, 2, 4, 16):
        costs.passed(n_rows, true_s(n_rows))
    before = costs.at(16)
    costs.passed(16, 50.0)
    assert costs.at(16) == before
    for _ in range(2):
        costs.passed(16, 10 * before)
    assert costs.at(16) == pytest.approx(10 * before, rel=0.2)


def test_a_slow_machine_changes_no_ratio() -> None:
    costs = measured().costs
    random = np.random.default_rng(0)
    for _ in range(10):
        costs.drafted("net", 4, 1e-3)
    before = costs.at(16) / costs.at(1)
    for n_rows in random.choice(WIDTHS[:5], 200).tolist():
        costs.passed(n_rows, 7.0 * true_s(n_rows) * random.lognormal(0.0, 0.1))
    assert costs.at(1) == pytest.approx(7.0 * true_s(1), rel=0.2)
    assert costs.at(16) / costs.at(1) == pytest.approx(before, rel=0.15)
    assert costs.at(64) == pytest.approx(7.0 * true_s(64), rel=0.2), "not run since"
    for _ in range(2):
        costs.drafted("net", 4, 7e-3)
    assert costs.draft_s("net", 4) == pytest.approx(7e-3, rel=0.2), "no surprise"


@pytest.mark.parametrize("position_s", [0.02e-3, 0.3e-3, 0.6e-3])
def test_a_draft_that_the_host_did_not_wait_for_is_measured_with_its_pass(position_s: float) -> None:
    costs, call = measured().costs, Call("net", 4, 2)
    random = np.random.default_rng(0)

    def serve_together(slower: float, n_passes: int = 40) -> None:
        for _ in range(n_passes):
            seconds = true_s(8) + slower * call.n_positions * position_s
            costs.passed(8, seconds * random.lognormal(0.0, 0.05), call)

    serve_together(1.0)
    assert costs.at(8) == pytest.approx(true_s(8), rel=0.15), "known before, so the draft is to blame"
    assert costs.draft_s("net", 4, 2) == pytest.approx(4 * position_s, rel=0.3, abs=0.1 * true_s(8))
    serve_together(5.0)
    both = true_s(8) + 20 * position_s
    assert costs.at(8) + costs.draft_s("net", 4, 2) == pytest.approx(both, rel=0.15)


def test_prompt_work_behind_an_unread_draft_says_nothing_of_either() -> None:
    costs = measured().costs
    costs.passed(WIDTHS[-1] + 1, 100.0, Call("net", 4, 2))
    assert costs.draft_s("net", 4) == 0.0
    assert costs.at(8) == pytest.approx(true_s(8))


def test_a_width_that_became_dear_is_left_and_found_again() -> None:
    lengths = measured()
    assert rate(serve(lengths, 50)) > 0.98
    slow = serve(lengths, 600, lambda n: 10 * true_s(n) if n > 13 else true_s(n))
    n_wide = sum(n > 12 for n in slow)
    assert 2 <= n_wide <= 30, "they are looked at now and then, for a few hundredths of the time"
    serve(lengths, 300)
    assert rate(serve(lengths, 100)) > 0.95
    serve(lengths, 1000)
    assert rate(serve(lengths, 500)) > 0.98


def test_two_slow_passes_do_not_end_drafting() -> None:
    """As measured once: passes of two rows were slow twice, and no draft was verified for 100,000 passes."""
    lengths = Lengths(adaptive=True)
    for n_rows, seconds in [(1, 0.6e-3), (2, 0.7e-3), (4, 0.8e-3), (8, 0.9e-3), (16, 1e-3)]:
        lengths.costs.passed(n_rows, seconds)
    assert lengths.trim([SURE], ONE) == [15]
    for _ in range(2):
        lengths.costs.passed(2, 20e-3)
    assert lengths.trim([SURE], ONE)[0] > 8


@pytest.mark.parametrize("seconds", [1e-9, 1000.0, 0.0, -1.0])
def test_a_clock_that_jumps_does_no_harm(seconds: float) -> None:
    lengths = measured()
    serve(lengths, 20)
    for n_rows in (1, 16, 16, 1, 2, 8):
        lengths.costs.passed(n_rows, seconds)
    serve(lengths, 200)
    assert rate(serve(lengths, 50)) > 0.95


@pytest.mark.parametrize("row_s", [0.3e-3, 0.55e-3])
def test_doubting_all_widths_together_takes_less_than_a_hundredth_of_the_time(row_s: float) -> None:
    """Rows are as dear as they were measured, and no draft pays: what is doubted is doubted for nothing."""
    lengths = Lengths(adaptive=True)

    def seconds(n_rows: int) -> float:
        return 0.6e-3 + row_s * (n_rows - 1)

    for n_rows in WIDTHS:
        lengths.costs.passed(n_rows, seconds(n_rows))
    chosen = serve(lengths, 6000, seconds, UNSURE)
    spent_s = sum(seconds(1 + n) for n in chosen)
    gained_s = seconds(1) * sum(1 + UNSURE[:n].sum() for n in chosen)
    assert any(chosen)
    assert spent_s - gained_s <= 0.007 * spent_s + 2 * seconds(1)


@pytest.mark.sampled
@pytest.mark.parametrize("factor", [1.9, 8.0, 500.0])
def test_a_wrong_first_measurement_is_doubted_in_time(factor: float) -> None:
    """A server that started beside a busy neighbour: passes of several rows seemed dearer than they are."""
    lengths = Lengths(adaptive=True)
    for n_rows in WIDTHS:
        lengths.costs.passed(n_rows, true_s(n_rows) * (factor if n_rows > 1 else 1.0))
    serve(lengths, 8000)
    assert rate(serve(lengths, 500)) > 0.95


def test_a_first_measurement_that_cannot_be_is_not_believed() -> None:
    """Together, 16 rows took longer than 16 passes of a single row: something else was running."""
    lengths = Lengths(adaptive=True)
    for n_rows in WIDTHS:
        lengths.costs.passed(n_rows, true_s(n_rows) * (20.0 if n_rows > 1 else 1.0))
    assert lengths.trim([SURE], ONE)[0] > 8


def passes_until_due(costs: Costs, n_rows: int = 16) -> int:
    """How many passes of so many rows run until one of a single row is due."""
    n = 0
    while not costs.is_due(1):
        costs.passed(n_rows, true_s(n_rows))
        n += 1
    return n


def test_a_pass_without_drafts_is_due_soon_after_a_change_and_seldom_else() -> None:
    costs = measured().costs
    costs.passed(1, true_s(1))
    assert passes_until_due(costs) == 1024
    for _ in range(2):
        costs.passed(16, 10 * true_s(16))
    assert costs.is_due(1)
    found = []
    for _ in range(7):
        costs.passed(1, true_s(1))
        found.append(passes_until_due(costs))
    assert found == [32, 64, 128, 256, 512, 1024, 1024]


def test_a_pass_without_drafts_is_due_soon_if_a_first_measurement_is_not_believed() -> None:
    costs = Costs()
    for n_rows in WIDTHS:
        costs.passed(n_rows, true_s(n_rows) * (20.0 if n_rows > 1 else 1.0))
    assert passes_until_due(costs) <= 32


def test_wide_passes_that_take_what_was_expected_do_not_put_off_a_plain_one() -> None:
    costs = measured().costs
    for _ in range(400):
        costs.passed(16, true_s(16))
    for n_rows, times in ((16, 10), (16, 10), (1, 1), (1, 1)):  # a change
        costs.passed(n_rows, times * true_s(n_rows))
    for n_rows in (2, 3, 4, 6, 8, 12) * 12:
        costs.passed(n_rows, true_s(n_rows))
    assert costs.is_due(1)


def test_what_was_due_is_believed_of_its_width() -> None:
    """Passes of 16 rows became dear, and plain ones were thought to have: the first two show otherwise."""
    costs = measured().costs
    for _ in range(100):
        costs.passed(16, 10 * true_s(16))
    assert costs.at(1) > 3 * true_s(1)
    assert costs.is_due(1)
    for _ in range(2):
        costs.passed(1, true_s(1))
    assert costs.at(1) == pytest.approx(true_s(1), rel=0.2)
    costs.passed(16, 10 * true_s(16))
    assert costs.at(16) == pytest.approx(10 * true_s(16), rel=0.2)
    assert costs.at(1) == pytest.approx(true_s(1), rel=0.3), "the machine has not become slower"


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("spread", [0.1, 0.3, 0.5])
def test_no_history_ends_drafting(spread: float, *, is_whole: bool) -> None:
    """Passes of all widths that took any time, some of them a thousand times too long."""
    random = np.random.default_rng(5)
    for _ in range(20 if is_whole else 7):
        lengths = measured()
        for _ in range(int(random.integers(1, 120))):
            n_rows = int(random.integers(1, 20))
            hiccup = 1000.0 if random.random() < 0.05 else 1.0
            lengths.costs.passed(n_rows, true_s(n_rows) * random.lognormal(0.0, spread) * hiccup)
        serve(lengths, 200)
        assert rate(serve(lengths, 100)) > 0.9
        serve(lengths, 1000)
        assert rate(serve(lengths, 500)) > 0.95


def test_a_networks_calls_positions_and_rows_are_told_apart() -> None:
    costs = measured().costs
    random = np.random.default_rng(1)
    for _ in range(40):
        depth, n_fed = int(random.integers(1, 9)), int(random.choice([1, 3, 400]))
        costs.drafted("net", depth, 0.1e-3 + depth * 0.2e-3 + n_fed * 0.01e-3, n_fed)
    call_s, position_s, row_s = costs.call_s("net")
    assert call_s == pytest.approx(0.1e-3, rel=0.5)
    assert position_s == pytest.approx(0.2e-3, rel=0.1)
    assert row_s == pytest.approx(0.01e-3, rel=0.1)


def test_a_call_that_costs_the_same_at_any_length_leaves_no_cost_at_nothing() -> None:
    """It would have to be below nothing to explain calls that take less and less for more and more."""
    costs = measured().costs
    for i in range(3000):
        costs.drafted("flat", 1 + i % 16, 0.2e-3 - i % 16 * 1e-6)
    assert all(0 < one < 0.3e-3 for one in costs.call_s("flat"))
    assert costs.draft_s("flat", 8) == pytest.approx(0.19e-3, rel=0.1)


def test_what_is_fed_by_the_way_is_not_taken_for_what_rows_cost() -> None:
    """A network that is asked at every pass is fed a row or two; many rows in one call would cost next to nothing."""
    costs = measured().costs
    for n_fed in (1, 2, 1, 1, 3) * 20:
        costs.drafted("net", 4, 0.3e-3 + 4 * 0.2e-3 + n_fed * 0.001e-3, n_fed)
    assert costs.draft_s("net", 4, 500) < 5e-3


def test_what_feeding_costs_is_not_doubted_because_a_small_call_would_be() -> None:
    """Calls that are fed a row say little for long; a trial that is fed 400 would seem to cost a tenth."""
    costs = measured().costs
    for n_fed in (400, 1, 200, 100, 400, 1, 200, 400, 1, 1, 1):
        costs.drafted("net", 2, 0.3e-3 + 0.01e-3 * n_fed, n_fed)
    assert costs.draft_s("net", 2, 1) == pytest.approx(0.3e-3, rel=0.3)
    for _ in range(400):
        costs.passed(1, true_s(1))
    assert costs.draft_s("net", 2, 1) < 0.2e-3, "doubted"
    assert costs.draft_s("net", 2, 400) == pytest.approx(4.3e-3, rel=0.2)


def test_passes_that_become_slow_and_fast_put_no_drafter_in_doubt() -> None:
    """On cores that others want each change had a network thought cheap, and so asked, though it is always wrong."""
    costs = measured().costs
    for _ in range(20):
        costs.drafted("net", 2, 5 * true_s(1))
    for times in (10, 1) * 5:
        for _ in range(4):
            costs.passed(1, times * true_s(1))
    assert costs.draft_s("net", 2) > 4 * costs.at(1)


def test_a_network_that_seemed_dear_once_is_asked_again() -> None:
    lengths = measured()
    lengths.costs.drafted("net", 4, 5.0)
    assert lengths.costs.draft_s("net", 1) <= 2 * true_s(1), "a first measurement is no reason to give up"
    for _ in range(12):
        lengths.costs.drafted("net", 4, 1e-3)
    assert lengths.costs.draft_s("net", 4) == pytest.approx(1e-3, rel=0.2)
