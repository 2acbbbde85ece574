"""Owners in turn: in the queue by itself, and for the slots of an engine."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from slipstream.engine.api import Delta, Done
from slipstream.engine.fair_queue import FairQueue
from tests.unit.toy import Toy, toy_engine, toy_slot


def emptied(queue: FairQueue[str], held: dict[str, int] | None = None) -> list[str]:
    return [queue.pop(held or {}) for _ in range(len(queue))]


def filled(*names: str) -> FairQueue[str]:
    """The first letter is the owner."""
    queue: FairQueue[str] = FairQueue()
    for name in names:
        queue.add(name[0], name)
    return queue


def test_one_owner_is_served_in_order_of_arrival() -> None:
    assert emptied(filled("a1", "a2", "a3")) == ["a1", "a2", "a3"]


def test_owners_take_turns() -> None:
    assert emptied(filled("a1", "a2", "a3", "b1", "c1", "b2")) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_who_comes_new_is_before_who_was_served() -> None:
    queue = filled("a1", "a2", "a3")
    assert queue.pop() == "a1"
    queue.add("b", "b1")
    assert emptied(queue) == ["b1", "a2", "a3"]


def test_who_holds_least_is_next() -> None:
    assert emptied(filled("a1", "b1", "c1"), {"a": 2, "b": 1}) == ["c1", "b1", "a1"]


def test_what_cannot_be_served_now_keeps_its_place() -> None:
    queue = filled("a1", "a2", "b1", "a3")
    assert queue.pop(may=lambda item: item not in ("a1", "b1")) == "a2"
    with pytest.raises(ValueError, match="empty"):
        queue.pop(may=lambda item: item == "c1")
    assert emptied(queue) == ["b1", "a1", "a3"]


def test_dropping_is_no_turn() -> None:
    queue = filled("a1", "a2", "b1", "b2")
    assert queue.drop(lambda item: item in ("a1", "b1")) == ["a1", "b1"]
    assert queue.drop(lambda item: item == "c1") == []
    assert len(queue) == 2
    assert emptied(queue) == ["a2", "b2"]
    with pytest.raises(ValueError, match="empty"):
        queue.pop()


def test_any_life_of_a_queue() -> None:
    """Nothing is lost, each owner's order is kept, and no owner waits while another has two turns."""
    rng = random.Random(2)
    for _ in range(100):
        queue: FairQueue[str] = FairQueue()
        waiting: dict[str, list[str]] = {name: [] for name in "abc"}
        passed: Counter[tuple[str, str]] = Counter()  # turns of the second since the first began to wait
        for number in range(60):
            owner = rng.choice("aaab" if number % 2 else "abc")
            if rng.random() < 0.55:
                queue.add(owner, f"{owner}{number}")
                waiting[owner].append(f"{owner}{number}")
            elif queue:
                item = queue.pop()
                assert item == waiting[item[0]].pop(0)
                for other in "abc":
                    passed[item[0], other] = 0
                    if waiting[other] and other != item[0]:
                        passed[other, item[0]] += 1
                        assert passed[other, item[0]] <= 1
        assert len(queue) == sum(map(len, waiting.values()))


# --- slots ---


def play(toy: Toy, n_tokens: int) -> tuple[list[str], list[str]]:
    """Run what was added to its end: names in order of their first token, and of their end."""
    began: list[str] = []
    ended: list[str] = []
    while toy.engine.busy:
        for name, event in toy.engine.step():
            if isinstance(event, Delta) and name not in began:
                began.append(name)
            if isinstance(event, Done):
                assert event.usage.n_completion == n_tokens
                ended.append(name)
    return began, ended


def add(toy: Toy, name: str, n_tokens: int) -> None:
    owner = name[0]
    toy.engine.add(toy_slot(name, [1, 2, 3], max_tokens=n_tokens, owner=owner))


@pytest.mark.parametrize("n_slots", [1, 3])
def test_a_key_with_a_hundred_requests_delays_anothers_by_no_more_than_a_slots_turn(n_slots: int) -> None:
    toy, n_tokens = toy_engine(n_slots=n_slots), 3
    for i in range(100):
        add(toy, f"a{i}", n_tokens)
    for _ in range(2):
        toy.engine.step()
    add(toy, "b", n_tokens)
    began, ended = play(toy, n_tokens)
    assert len(ended) == 101
    # Only what had a slot when it came was before it; the steps above had begun those.
    assert began.index("b") == 0 or set(began[: began.index("b")]) <= {f"a{i}" for i in range(n_slots)}
    assert [one for one in began if one != "b"] == [f"a{i}" for i in range(100) if f"a{i}" in began]
    assert [one for one in ended if one != "b"] == [f"a{i}" for i in range(100)], "its own are in order"


def test_slots_are_shared_out_evenly() -> None:
    """The first owner has all slots until others come; as they become free, each of three gets one."""
    toy = toy_engine(n_slots=3)
    for i in range(9):
        add(toy, f"a{i}", 5 + i % 3)
    toy.engine.step()
    for i in range(9):
        add(toy, f"b{i}", 5 + i % 3)
        add(toy, f"c{i}", 5 + i % 3)
    shares: list[Counter[str]] = []
    while toy.engine.busy:
        toy.engine.step()
        shares.append(Counter(slot.request.owner for slot in toy.engine.seats.slots if slot is not None))
    assert shares[0] == Counter(a=3)
    first = shares.index(Counter("abc"))
    assert first <= 10
    # Until one of them has nothing left.
    assert all(max(share.values()) == 1 for share in shares[first : first + 20])


def test_requests_of_one_owner_get_slots_in_order_of_arrival() -> None:
    toy = toy_engine(n_slots=2)
    for i in range(6):
        add(toy, f"a{i}", 3)
    began, _ = play(toy, 3)
    assert began == [f"a{i}" for i in range(6)]


def test_a_request_waits_for_the_slot_it_wants_and_holds_up_no_other() -> None:
    engine = toy_engine(n_slots=2).engine
    began: dict[str, int] = {}

    def step() -> None:
        engine.step()
        for slot in engine.seats.running:
            began.setdefault(slot.request.id, slot.id)

    for name, wanted, n_tokens in (("first", 1, 30), ("second", 1, 3), ("third", None, 3), ("fourth", 0, 3)):
        engine.add(toy_slot(name, [1, 2, 3], wanted=wanted, max_tokens=n_tokens))
    step()
    assert began == {"first": 1, "third": 0}
    while engine.busy:
        step()
    assert began == {"first": 1, "third": 0, "fourth": 0, "second": 1}
    assert list(began) == ["first", "third", "fourth", "second"]
