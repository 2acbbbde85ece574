"""How long a request may wait, and take in all."""

from __future__ import annotations

from slipstream.engine.api import Failed
from slipstream.engine.core.queue import Waiting
from slipstream.engine.errors import Overloaded, TimedOut
from tests.unit.toy import toy_engine, toy_slot
from tests.wound_clock import WoundClock


def test_who_waits_too_long_leaves_the_queue() -> None:
    waiting = Waiting(queue_s=5.0)
    for owner, name, since_s in (("x", "a", 0.0), ("x", "b", 2.0), ("y", "c", 1.0)):
        waiting.add(toy_slot(name, [1], owner=owner), since_s)
    assert waiting.expired(5.0) == []
    ((name, error),) = waiting.expired(5.5)
    assert name == "a"
    assert isinstance(error, Overloaded)
    assert "no slot became free within 5 s; --max-queue-wait" in str(error)
    assert [name for name, _ in waiting.expired(7.5)] == ["b", "c"]
    assert len(waiting) == 0


def test_without_limits_a_request_waits_for_ever() -> None:
    waiting = Waiting()
    slot = toy_slot("a", [1])
    waiting.add(slot, 0.0)
    assert waiting.expired(1e9) == []
    assert not waiting.is_late(slot, 1e9)


def test_what_a_request_may_take_counts_from_its_arrival_and_its_wait_from_when_it_was_prepared() -> None:
    """One whose preparation took long is queued behind those that came later, and is over before them."""
    waiting = Waiting(queue_s=4.0, request_s=10.0)
    for name, admitted_s, queued_s in (("quick", 6.0, 6.5), ("slow", 0.0, 8.0), ("last", 8.0, 8.5)):
        slot = toy_slot(name, [1])
        slot.stats.admitted_s = admitted_s
        waiting.add(slot, queued_s)
    assert waiting.expired(10.0) == []
    ((name, error),) = waiting.expired(10.2)
    assert name == "slow"
    assert isinstance(error, TimedOut)
    ((name, error),) = waiting.expired(11.0)
    assert name == "quick"
    assert isinstance(error, Overloaded)
    assert waiting.expired(12.0) == []
    assert [name for name, _ in waiting.expired(13.0)] == ["last"]


def test_the_limit_of_a_request_counts_waiting_and_running() -> None:
    clock = WoundClock()
    toy = toy_engine(n_slots=1, now=clock, waiting=Waiting(request_s=10.0))
    for name in ("runs", "waits"):
        toy.engine.add(toy_slot(name, [1, 2], max_tokens=200))
    clock.wind(9.0)
    assert not [event for _, event in toy.engine.step() if isinstance(event, Failed)]
    clock.wind(1.5)
    ended = {name: event.error for name, event in toy.engine.step() if isinstance(event, Failed)}
    assert set(ended) == {"runs", "waits"}
    assert all(isinstance(error, TimedOut) for error in ended.values())
    assert not toy.engine.busy
