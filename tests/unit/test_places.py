"""How many requests an owner may have, beside those of others."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from slipstream.engine.errors import Overloaded
from slipstream.engine.service.run.admission import Places


def ask(places: Places, owner: str, taken: Counter[str]) -> bool:
    try:
        places.check(owner, taken)
    except Overloaded:
        return False
    taken[owner] += 1
    return True


def flood(places: Places, owner: str, taken: Counter[str]) -> int:
    """How many requests an owner gets in that asks for any number."""
    n_before = taken[owner]
    while ask(places, owner, taken):
        pass
    return taken[owner] - n_before


def test_a_refusal_names_the_setting() -> None:
    places, taken = Places(8), Counter(a=6, b=1)
    with pytest.raises(Overloaded, match=r"all 8 places are taken; --max-queue"):
        places.check("a", Counter(a=8))
    places.check("b", Counter(a=6))
    with pytest.raises(Overloaded, match=r"this key has 6 requests already, .* --max-queue"):
        places.check("a", taken)


@pytest.mark.parametrize("n_places", [1, 2, 5, 68])
def test_a_single_owner_has_all_places(n_places: int) -> None:
    places, taken = Places(n_places), Counter[str]()
    assert flood(places, "a", taken) == n_places
    taken["a"] -= 1
    assert flood(places, "a", taken) == 1


def test_one_that_floods_leaves_places_for_those_known() -> None:
    places, taken = Places(68), Counter[str]()
    assert ask(places, "b", taken)
    taken["b"] -= 1
    assert flood(places, "a", taken) == 51
    assert flood(places, "b", taken) == 17
    assert not ask(places, "c", taken), "there was none to be kept for it"
    taken["a"] -= 11
    assert not ask(places, "a", taken), "now there are: 11"
    assert flood(places, "c", taken) == 11


def test_there_are_no_more_places_kept_than_half() -> None:
    """With more owners than that, those that asked last have one each."""
    places, taken = Places(20), Counter[str]()
    for number in range(1000):
        assert ask(places, f"o{number}", taken)
        taken.clear()
    assert flood(places, "a", taken) == 20 - 9
    assert all(ask(places, f"o{number}", taken) for number in range(991, 1000))
    assert taken.total() == 20


def test_any_crowd() -> None:
    """There are never more requests than places, and a known owner without a request always gets one in."""
    rng = random.Random(4)
    for _ in range(50):
        n_places, owners = rng.randrange(8, 40), [f"o{number}" for number in range(rng.randrange(2, 5))]
        places, taken = Places(n_places), Counter[str]()
        for owner in owners:
            assert ask(places, owner, taken)
        for _ in range(300):
            owner = rng.choice([*owners, owners[0], owners[0]])
            if rng.random() < 0.3 and taken[owner]:
                taken[owner] -= 1
                continue
            had = taken[owner]
            got_in = ask(places, owner, taken)
            assert got_in or had
            assert taken.total() <= n_places
