"""Whether reading a pass before the next is launched pays: tokens gained against the device's wait."""

from __future__ import annotations

import pytest

from slipstream.engine.speculate.decide.overlap import Overlap
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, TextDrafter, Want
from tests.unit.doubles import AsNetwork
from tests.unit.toy import toy_engine, toy_slot
from tests.wound_clock import WoundClock

TOKEN_S = 0.01


def looked(overlap: Overlap, slot_id: int, *n_accepted: int) -> None:
    """Passes that were looked for, and what they kept of drafters that read text."""
    for n in n_accepted:
        overlap.ask([slot_id])
        overlap.gain(slot_id, n)


def fresh(*, adaptive: bool = False) -> Overlap:
    """Nothing is what is usual."""
    overlap = Overlap(adaptive=adaptive)
    looked(overlap, 99, *[0] * 500)
    return overlap


def test_passes_are_read_first_until_that_has_gained_nothing_for_long() -> None:
    overlap = Overlap(adaptive=False)
    n_looks = 0
    while overlap.reads_first([0], TOKEN_S):
        looked(overlap, 0, 0)
        n_looks += 1
        assert n_looks < 100
    assert n_looks > 20
    assert overlap.reads_first([1], TOKEN_S)  # one silent text does not speak for the next
    assert not fresh().reads_first([0], TOKEN_S)


def test_no_slots_gain_nothing() -> None:
    assert not Overlap(adaptive=False).reads_first([], TOKEN_S)


def test_what_is_brought_in_is_weighed_against_the_gap() -> None:
    overlap = fresh(adaptive=True)
    for _ in range(40):
        overlap.waited(0.002)
    looked(overlap, 0, *[0, 0, 0, 0, 0, 1] * 30)  # less than a fifth of a token a pass, or 2 ms
    looked(overlap, 0, 0, 0, 0)
    assert not overlap.reads_first([0], TOKEN_S)
    assert overlap.reads_first([0], 10 * TOKEN_S)
    assert overlap.reads_first([0, 0], TOKEN_S)  # two such slots run together
    looked(overlap, 1, *[0, 1] * 30)
    assert overlap.reads_first([1], TOKEN_S)
    for _ in range(100):
        overlap.waited(0.02)
    assert not overlap.reads_first([1], TOKEN_S)


def test_a_slot_that_stops_copying_is_looked_at_no_longer() -> None:
    overlap = fresh()
    looked(overlap, 0, 8, 8, 8)
    looked(overlap, 0, *[0] * 20)
    assert overlap.reads_first([0], TOKEN_S)
    looked(overlap, 0, *[0] * 60)
    assert not overlap.reads_first([0], TOKEN_S)


def test_passes_that_were_not_looked_for_say_nothing() -> None:
    """Drafters that read text had no say in them."""
    overlap = fresh()
    looked(overlap, 0, 8)
    for _ in range(200):
        overlap.gain(0, 0)
    assert overlap.reads_first([0], TOKEN_S)


def test_another_text_begins_with_what_is_usual() -> None:
    overlap = fresh()
    looked(overlap, 0, 8)
    overlap.ask([0])
    overlap.begin(0)
    overlap.gain(0, 8)  # of the text before
    looked(overlap, 1, *[0] * 80)
    assert not overlap.reads_first([1], TOKEN_S)
    assert overlap.reads_first([0], TOKEN_S)  # 8 tokens once are not forgotten by all at once
    looked(overlap, 1, *[0] * 200)
    assert not overlap.reads_first([0], TOKEN_S)


class Slow(TextDrafter):
    """Takes a thousand seconds to say nothing."""

    name = "slow"

    def __init__(self, clock: WoundClock) -> None:
        self._clock = clock

    def guess(self, want: Want) -> Guess:
        self._clock.wind(1000.0)
        return NO_GUESS


def test_the_gap_is_the_hosts_time_between_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that of drafters and that of nothing to do."""
    clock, gaps = WoundClock(tick=1.0), []
    monkeypatch.setattr(Overlap, "waited", lambda self, seconds: gaps.append(seconds))
    toy = toy_engine(lambda cache: [AsNetwork(Slow(clock))], n_slots=1, overlaps=True, now=clock)
    for name in ("a", "b"):
        toy.engine.add(toy_slot(name, [1, 2], types=("slow",)))
        while toy.engine.busy:
            toy.engine.step()
        clock.wind(1e6)
    # 20 passes each: nobody waited for the first, and the last, which has no room for drafts, follows an unread one.
    assert len(gaps) == 2 * 18
    assert 0 < min(gaps) <= max(gaps) < 100
