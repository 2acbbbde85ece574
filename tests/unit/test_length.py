"""What is known of drafters' acceptance and of costs, and the lengths that follow from both."""

from __future__ import annotations

from collections.abc import Iterable
from unittest.mock import patch

import numpy as np
import pytest

from slipstream.engine.speculate.decide.cost import WIDTHS
from slipstream.engine.speculate.decide.survival import Shadows, Survival, grades
from slipstream.engine.speculate.decide.value import Lengths, Pass
from tests.unit.toy import toy_slot

ONE = Pass(1, 1)


def lengths_with_cost(slope: float) -> Lengths:
    """A machine on which each further row costs `slope` of the first."""
    lengths = Lengths(adaptive=True)
    for tier in WIDTHS:
        lengths.costs.passed(tier, 1.0 + slope * (tier - 1))
    return lengths


def falling(rate: float, n: int) -> np.ndarray:
    return np.cumprod(np.full(n, rate))


@pytest.mark.parametrize(
    ("rate", "slope", "least", "most"),
    [
        (1.0, 0.02, 16, 16),  # everything accepted, rows nearly free: as long as allowed
        (0.01, 0.02, 0, 0),  # next to nothing accepted: not at all
        (0.9, 1.0, 0, 0),  # every row costs a whole pass: drafts can never pay
        (0.8, 0.02, 6, 12),  # the best K of the cost model: d(1 - a^(K+1))/(1 - a)/(1 + cK) = 0 at 9
        (0.6, 0.05, 2, 4),
    ],
)
def test_length_follows_acceptance_and_cost(rate: float, slope: float, least: int, most: int) -> None:
    (n,) = lengths_with_cost(slope).trim([falling(rate, 16)], ONE)
    assert least <= n <= most
    expected = [(1 + falling(rate, k).sum()) / (1 + slope * k) for k in range(17)]
    assert expected[n] == pytest.approx(max(expected), rel=0.03)


def test_rows_go_to_the_drafts_that_promise_most() -> None:
    lengths = lengths_with_cost(0.1)
    assert lengths.trim([falling(0.95, 16), falling(0.3, 16), np.empty(0)], Pass(3, 3))[1:] == [0, 0]
    long, short, _ = lengths.trim([falling(0.95, 16), falling(0.7, 16), np.empty(0)], Pass(3, 3))
    assert long > short > 0


def test_dear_rows_beside_a_prompt_shorten_drafts() -> None:
    lengths = lengths_with_cost(0.001)
    for tier, seconds in ((64, 1.1), (128, 20.0)):
        for _ in range(200):
            lengths.costs.passed(tier, seconds)
    alone, beside = (lengths.trim([falling(0.8, 16)], coming)[0] for coming in (ONE, Pass(1, 100)))
    assert beside < alone


def test_a_prompt_beside_them_costs_drafts_nothing_where_rows_cost_the_same() -> None:
    lengths = lengths_with_cost(0.02)
    assert lengths.trim([falling(0.8, 16)], Pass(1, 60)) == lengths.trim([falling(0.8, 16)], ONE)
    assert lengths.price(Pass(1, 60)) == pytest.approx(lengths.price(ONE), rel=0.01)


def test_without_adaptation_everything_is_verified() -> None:
    lengths = Lengths(adaptive=False)
    assert lengths.trim([falling(0.1, 16), falling(0.9, 3)], Pass(2, 2)) == [16, 3]
    assert lengths.depth("d", [falling(0.1, 4)], [falling(0.9, 16)], [0], ONE) == (16, [True])


@pytest.mark.parametrize("n_max", range(1, 20))
def test_without_adaptation_a_network_drafts_as_deep_as_it_may(n_max: int) -> None:
    lengths = Lengths(adaptive=False)
    assert lengths.depth("d", [np.empty(0)], [falling(0.5, n_max)], [0], ONE) == (n_max, [True])


def test_a_network_drafts_as_deep_as_its_own_cost_allows() -> None:
    lengths = lengths_with_cost(0.02)
    depths = []
    for cost in (0.001, 0.05, 0.2, 2.0):
        for n_positions in (1, 8) * 50:
            lengths.costs.drafted("d", n_positions, n_positions * cost)
        depths.append(lengths.depth("d", [np.empty(0)], [falling(0.8, 16)], [0], ONE)[0])
    assert depths == sorted(depths, reverse=True)
    assert depths[0] >= 6
    assert depths[-1] == 0


def test_a_pass_that_seems_cheap_because_it_is_wider_takes_as_many_drafts() -> None:
    """Passes of eight rows seem to cost a tenth, but two guesses and what the text gives are three rows."""
    lengths = Lengths(adaptive=True)
    for n_rows in WIDTHS:
        lengths.costs.passed(n_rows, 0.1 if n_rows == 8 else 1.0)
    for n_positions in (1, 2) * 20:
        lengths.costs.drafted("d", n_positions, 0.65 * n_positions)
    assert lengths.depth("d", [np.empty(0)], [falling(0.6, 2)], [0], ONE) == (0, [False])
    for n_positions in (1, 7) * 20:
        lengths.costs.drafted("d", n_positions, 0.1 * n_positions)
    assert lengths.depth("d", [np.empty(0)], [falling(0.6, 7)], [0], ONE)[0] == 7


def test_a_network_that_is_not_looked_at_closely_would_not_pay() -> None:
    """The quick look turns down nothing that the close one would take, and most of what it would not."""
    random = np.random.default_rng(0)
    n_taken = n_left = 0
    for _ in range(400):
        lengths = lengths_with_cost(random.choice([0.002, 0.02, 0.2]))
        n_slots = int(random.integers(1, 6))
        lengths.costs.drafted("net", 1, float(random.choice([0.02, 0.2, 1.0])))
        drafted = [falling(random.uniform(0.02, 0.9), 8) for _ in range(n_slots)]
        free = [falling(random.uniform(0.0, 0.9), int(random.integers(0, 6))) for _ in range(n_slots)]
        coming = Pass(n_slots, n_slots)
        quick = lengths.depth("net", free, drafted, [0] * n_slots, coming)
        with patch.object(Lengths, "_may_pay", lambda *args: True):
            close = lengths.depth("net", free, drafted, [0] * n_slots, coming)
        assert quick == close
        n_taken += close[0] > 0
        n_left += not (close[0] or lengths._may_pay("net", drafted, coming))
    assert n_taken > 50
    assert n_left > 30


def test_a_network_is_left_out_where_a_free_draft_promises_as_much() -> None:
    lengths = lengths_with_cost(0.02)
    lengths.costs.drafted("d", 4, 0.2)
    free = [falling(0.95, 16), np.empty(0), falling(0.2, 16)]
    depth, takes = lengths.depth("d", free, [falling(0.8, 16)] * 3, [0] * 3, Pass(3, 3))
    assert depth >= 2
    assert takes == [False, True, True]


def test_acceptance_is_learnt_per_place_and_grade() -> None:
    survival = Survival()
    random = np.random.default_rng(0)
    for _ in range(600):
        sure = random.random() < 0.5
        grade = grades([0.99 if sure else 0.4] * 6, 6)
        rates = [0.95 if sure else 0.2, *[0.9] * 5]
        n = next((i for i, rate in enumerate(rates) if random.random() > rate), 6)
        survival.judge("d", toy_slot("r", [1]), grade[: n + 1].tolist(), 0, n)
    survival.begin(0)
    sure, doubtful = (
        survival.of("d", toy_slot("r", [1], slot_id=1), grades([own] * 6, 6)) for own in (0.99, 0.4)
    )
    assert sure[0] == pytest.approx(0.95, abs=0.06)
    assert doubtful[0] == pytest.approx(0.2, abs=0.08)
    assert doubtful[3] / doubtful[2] == pytest.approx(0.9, abs=0.1)
    assert survival.expected("d", [toy_slot("r", [1], slot_id=1)], 1)[0, 0] == pytest.approx(0.575, abs=0.1)
    assert np.all(np.diff(sure) <= 0)


def test_a_slot_deviates_from_the_average_and_its_next_request_does_not() -> None:
    survival = Survival()
    for _ in range(100):
        survival.judge("d", toy_slot("r", [1]), [0] * 4, 0, 4)
    for _ in range(6):
        survival.judge("d", toy_slot("r", [1], slot_id=1), [0], 0, 0)
    good, bad = (
        survival.expected("d", [toy_slot("r", [1])], 1)[0, 0],
        survival.expected("d", [toy_slot("r", [1], slot_id=1)], 1)[0, 0],
    )
    assert bad < 0.5 * good
    survival.begin(1)
    assert survival.expected("d", [toy_slot("r", [1], slot_id=1)], 1)[0, 0] > 0.8


@pytest.mark.parametrize("n_unjudged", [500, 36_000, 40_000])
def test_what_a_slot_showed_long_ago_is_forgotten(n_unjudged: int) -> None:
    """Also after so many tokens that its weight is no number any more."""
    survival = Survival()
    for _ in range(100):
        survival.judge("d", toy_slot("r", [1]), [0] * 4, 0, 4)
    for _ in range(6):
        survival.judge("d", toy_slot("r", [1], slot_id=1), [0], 0, 0)
    late = toy_slot("r", [1] * n_unjudged, slot_id=1)
    usual = survival.expected("d", [toy_slot("r", [1], slot_id=2)], 4)[0]
    assert survival.expected("d", [late], 4)[0] == pytest.approx(usual, abs=0.01)
    survival.begin(1)
    assert np.isfinite(survival.expected("d", [toy_slot("r", [1], slot_id=1)], 4)[0]).all()


def judged_requests(survival: Survival, rates: Iterable[float], seed: int = 0) -> None:
    """Requests, one behind the other in a slot, in which so many of single tokens are right."""
    random = np.random.default_rng(seed)
    for rate in rates:
        survival.begin(0)
        slot = toy_slot("r", [1])
        for _ in range(24):
            survival.judge("d", slot, [0], 0, int(random.random() < rate))
            slot.append(1)


def believed(survival: Survival, n_wrong: int) -> float:
    """What is expected of a first token in a new request, after so many that were wrong."""
    slot = toy_slot("r", [1], slot_id=1)
    survival.begin(1)
    for _ in range(n_wrong):
        survival.judge("d", slot, [0], 0, 0)
    return float(survival.expected("d", [slot], 1)[0, 0])


def test_how_soon_a_request_is_believed_to_differ_follows_how_requests_do() -> None:
    """Half of the tokens are right, of every request or of all together."""
    alike, different = Survival(), Survival()
    judged_requests(alike, [0.5] * 40)
    judged_requests(different, [1.0, 0.0] * 20)
    assert believed(alike, 0) == pytest.approx(0.5, abs=0.12)
    assert believed(alike, 4) > 0.3
    assert believed(different, 4) < 0.12


def test_a_request_begins_as_the_last_requests_were() -> None:
    """Long before the average of all guesses says so."""
    survival = Survival()
    judged_requests(survival, [0.9] * 30)
    before = believed(survival, 0)
    judged_requests(survival, [0.02] * 6)
    assert before > 0.8
    assert believed(survival, 0) < 0.3
    assert survival.places("d")[0].acceptance > 0.6
    judged_requests(survival, [0.9] * 6)
    assert believed(survival, 0) > 0.55


def test_a_request_of_which_nothing_was_judged_changes_nothing() -> None:
    survival = Survival()
    judged_requests(survival, [0.1] * 10)
    survival.begin(0)
    before = believed(survival, 0)
    for _ in range(20):
        survival.begin(0)
    assert believed(survival, 0) == before


def test_only_what_was_judged_counts() -> None:
    """A rejected token says nothing about those after it, and one still to come nothing at all."""
    slot = toy_slot("r", [1])
    survival = Survival()
    judged: list[tuple[int, int, int]] = []
    survival.judge = lambda name, slot, grade, start, n: judged.append((len(grade), start, n))  # type: ignore
    shadows = Shadows(survival)
    shadows.begin(slot)
    shadows.watch(slot, "d", [5, 6, 7, 8], grades((), 4))
    shadows.judge(slot)
    assert judged == []
    slot.append(5)
    shadows.judge(slot)
    shadows.watch(slot, "d", [9, 9], grades((), 2))  # the first one is still open
    slot.append(6)
    slot.append(0)
    slot.append(8)
    shadows.judge(slot)
    assert judged == [(1, 0, 1), (2, 1, 1)]
    shadows.watch(slot, "d", [3], grades((), 1))
    slot.append(3)
    slot.append(4)
    shadows.judge(slot)
    assert judged[2:] == [(1, 0, 1)]


def test_a_network_is_tried_only_where_it_could_promise_more() -> None:
    lengths = lengths_with_cost(0.02)
    lengths.costs.drafted("n", 8, 1.0)  # a position costs an eighth of a pass
    for _ in range(50):
        lengths.costs.drafted("n", 8, 1.0)
        lengths.costs.drafted("n", 2, 0.25)

    def gains(free: np.ndarray, n_most: int = 16, n_unfed: int = 0) -> bool:
        return lengths.could_gain("n", free, n_most, n_unfed, Pass(1, 1))

    assert gains(np.zeros(0))
    assert gains(falling(0.5, 16))
    assert not gains(falling(0.99, 16))
    assert not gains(falling(0.99, 8), n_most=8)
    assert gains(falling(0.99, 2)), "more tokens than the draft that is there"
    assert gains(np.zeros(0), n_most=1)
    assert not gains(falling(0.95, 1), n_most=1)
    assert lengths.costs.draft_s("n", 0, 1) > 0.0
    assert not gains(np.zeros(0), n_unfed=100_000), "what it has to be fed costs more than it could bring"
    assert Lengths(adaptive=False).could_gain("n", falling(0.99, 16), 16, 0, Pass(1, 1))
