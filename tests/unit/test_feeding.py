"""What a network is fed is charged to as many calls as requests lately made of it."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.engine.speculate.decide.cost import WIDTHS
from slipstream.engine.speculate.decide.feeding import Feeding
from slipstream.engine.speculate.decide.value import Lengths, Pass
from tests.unit.toy import toy_slot


def requests(feeding: Feeding, *n_calls: int) -> None:
    """Requests one after another in one slot, each of which asks the network so often."""
    for n in n_calls:
        feeding.begin(0)
        for _ in range(n):
            feeding.called("network", [toy_slot("r", [1])])
    feeding.begin(0)


def test_calls_of_a_request_are_averaged_over_requests() -> None:
    feeding = Feeding()
    assert feeding.n_calls("network") == 4.0
    requests(feeding, *[100] * 60)
    assert feeding.n_calls("network") == pytest.approx(100, rel=0.01)
    requests(feeding, *[1] * 60)
    assert feeding.n_calls("network") == pytest.approx(1, rel=0.01)
    assert feeding.n_calls("another") == 4.0


def test_requests_that_do_not_ask_and_single_long_ones_say_little() -> None:
    feeding = Feeding()
    requests(feeding, *[0] * 60)
    assert feeding.n_calls("network") == 4.0
    requests(feeding, *[2] * 60, 2000)
    assert feeding.n_calls("network") < 4.1


def test_slots_are_counted_apart() -> None:
    feeding = Feeding()
    first, second = toy_slot("r", [1]), toy_slot("r", [1], slot_id=1)
    for _ in range(60):
        for slot in (first, second):
            feeding.begin(slot.id)
        feeding.called("network", [first, second])
        feeding.called("network", [first])
    assert feeding.n_calls("network") == pytest.approx(2**0.5, rel=0.06)


@pytest.mark.parametrize(("n_calls", "depth"), [(1, 0), (100, 2)])
def test_a_network_is_fed_a_prompt_where_requests_go_on_asking_it(n_calls: int, depth: int) -> None:
    lengths = Lengths(adaptive=True)
    for n_rows in WIDTHS:
        lengths.costs.passed(n_rows, 1.0 + 0.02 * n_rows)
    for n_fed in (1, 200, 400, 100) * 20:
        lengths.costs.drafted("network", 2, 0.1 + 0.01 * n_fed, n_fed)
    requests(lengths.feeding, *[n_calls] * 60)
    promised = np.array([0.8, 0.64])
    asked = lengths.depth("network", [np.empty(0)], [promised], [200], Pass(1, 1))
    assert asked == (depth, [depth > 0])
    assert lengths.could_gain("network", np.empty(0), 2, 200, Pass(1, 1)) == (depth > 0)
