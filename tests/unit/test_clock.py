"""The clock of a step: every moment in one part, moving averages, and a step of an engine that misses none."""

from __future__ import annotations

import pytest

from slipstream.engine.core.clock import PARTS, Clock
from tests.unit.toy import toy_engine, toy_slot
from tests.wound_clock import WoundClock


def told(figures: dict[str, float]) -> dict[str, float]:
    return {part: seconds for part, seconds in figures.items() if seconds}


def play(clock: Clock, hands: WoundClock, *laps: tuple[str, float]) -> None:
    """A step of these laps, with idling before it."""
    hands.wind(1000.0)
    clock.start()
    for part, seconds in laps:
        hands.wind(seconds)
        clock.lap(part)


def test_laps_add_up_and_idling_is_nobodys() -> None:
    hands = WoundClock()
    clock = Clock(hands)
    play(clock, hands, ("plan", 1.0), ("draft", 2.0), ("plan", 0.5), ("forward", 4.0))
    play(clock, hands, ("plan", 1.0), ("forward", 4.0))
    assert told(clock.totals()) == {"plan": 2.5, "draft": 2.0, "forward": 8.0}
    assert list(clock.totals()) == list(clock.averages()) == list(PARTS)


def test_averages_are_those_of_the_steps_so_far_then_fade() -> None:
    hands = WoundClock()
    clock = Clock(hands)
    play(clock, hands, ("forward", 4.0))
    assert told(clock.averages()) == {}, "a step counts when it is over"
    play(clock, hands, ("forward", 2.0), ("keep", 1.0))
    assert told(clock.averages()) == {"forward": 4.0}
    play(clock, hands)
    assert told(clock.averages()) == {"forward": 3.0, "keep": 0.5}
    for _ in range(500):
        play(clock, hands, ("forward", 8.0))
    averages = clock.averages()
    assert averages["forward"] == pytest.approx(8.0, rel=1e-2)
    assert averages["keep"] == pytest.approx(0.0, abs=1e-2)


def test_no_moment_of_a_step_is_missed_or_counted_twice() -> None:
    """With a clock that moves on by one at every look, the parts make up all looks between a step's first and last."""
    now = WoundClock(tick=1.0)
    toy = toy_engine(now=now)
    toy.engine.add(toy_slot("a", [1, 2, 3, 4, 5, 1, 2, 3]))
    visited: set[str] = set()
    while toy.engine.busy:
        before = toy.engine.clock.totals()
        begun = now.seconds
        toy.engine.step()
        after = toy.engine.clock.totals()
        parts = told({part: after[part] - before[part] for part in PARTS})
        assert sum(parts.values()) == now.seconds - begun - 1.0, "from the first look of the step to its last"
        visited |= parts.keys()
    assert visited == PARTS.keys() - {"tell"}, "what is told is the service's"
    assert toy.engine.stats().step_s == toy.engine.clock.totals()
