"""ngram-simple, the n-gram maps, ngram-mod, synthetic: against plain searches; their state against a rebuilt one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.bench.synthetic import Synthetic
from slipstream.engine.speculate.drafter import NO_DRAFT, Draft, Drafter, Kept, Want
from slipstream.engine.speculate.ngram.copying import Copying
from slipstream.engine.speculate.ngram.ngram_map import NgramMapK, NgramMapK4V
from slipstream.engine.speculate.ngram.ngram_mod import NgramMod
from slipstream.engine.speculate.ngram.ngram_simple import NgramSimple
from slipstream.engine.speculate.text import occurrences
from tests.unit.links import links
from tests.unit.toy import toy_slot

tokens_of = st.lists(st.integers(0, 2), min_size=1, max_size=40)
afters = st.lists(st.integers(0, 2), max_size=5)
small = st.integers(1, 4)
quick = settings(max_examples=150, deadline=None)

MAKERS: list[Callable[[], Copying]] = [
    lambda: NgramSimple(2, 6, 1, 2),
    lambda: NgramMapK(2, 6, 1, 2),
    lambda: NgramMapK4V(2, 6, 1, 2),
    lambda: NgramMod(2, 1, 6, 2),
]


def slot_of(tokens: list[int], slot_id: int = 0, n_max: int = 8) -> Slot:
    return toy_slot(f"r{slot_id}", tokens, slot_id=slot_id, n_max=n_max, max_tokens=10_000)


def began(drafter: Drafter, tokens: list[int], slot_id: int = 0) -> Slot:
    slot = slot_of(tokens, slot_id)
    drafter.begin(slot)
    return slot


def guess(drafter: Drafter, slot: Slot, n_max: int = 8, after: list[int] | None = None) -> list[int]:
    return list(drafter.draft([Want(slot, n_max, after or [])])[0].token_ids)


def keep(
    drafter: Drafter, slot: Slot, tokens: list[int], draft: Draft = NO_DRAFT, n_accepted: int = 0
) -> None:
    for token_id in tokens:
        slot.append(token_id)
    drafter.accept([Kept(slot, draft, n_accepted)])


def state(drafter: Copying, slot: Slot) -> object:
    """What the drafter knows of a slot once it was asked, in a form that can be compared."""
    guess(drafter, slot)
    return links(drafter._seen[slot.id])


def places_of(tokens: list[int], after: list[int], n: int) -> list[int]:
    """Where the last n tokens stood before a certain token, newest first."""
    text = tokens + after
    if len(text) < n:
        return []
    return [end for end in range(len(tokens) - 1, n - 1, -1) if tokens[end - n : end] == text[-n:]]


def continued(tokens: list[int], after: list[int], place: int, n: int) -> list[int]:
    source = (tokens + after)[place:]
    return [source[i % len(source)] for i in range(n)]


@quick
@given(tokens_of, afters, small, small, small, st.integers(1, 8))
def test_simple_and_map_k_copy_what_a_plain_search_finds(
    tokens: list[int], after: list[int], n: int, m: int, min_hits: int, n_max: int
) -> None:
    places = places_of(tokens, after, n)
    expected = continued(tokens, after, places[0], min(m, n_max)) if len(places) >= min_hits else []
    for drafter in (NgramSimple(n, m, min_hits, 1), NgramMapK(n, m, min_hits, 1)):
        assert guess(drafter, began(drafter, tokens), n_max, after) == expected


def outweighing(tokens: list[int], places: list[int], m: int) -> tuple[int, list[tuple[list[int], int]]]:
    """Place of the continuation ngram-map-k4v chooses, -1 if none; and all it tells apart, with their counts."""
    found: list[tuple[list[int], int, int]] = []  # what follows, its place, occurrences
    for place in places[:64]:
        follows = tokens[place : place + m]
        for i, (known, at, count) in enumerate(found):
            if all(a == b for a, b in zip(known, follows, strict=False)):
                longer = len(follows) > len(known)
                found[i] = (follows if longer else known, place if longer else at, count + 1)
                break
        else:
            if len(found) < 4:
                found.append((follows, place, 1))
    values = [(known, count) for known, _, count in found]
    if not found:
        return -1, values
    best = max(found, key=lambda one: one[2])
    others = sum(count for _, _, count in found) - best[2]
    return (best[1] if best[2] >= 2 * others else -1), values


@quick
@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), afters, st.integers(1, 2), small, small)
def test_map_k4v_copies_the_continuation_that_outweighs_the_others(
    tokens: list[int], after: list[int], n: int, m: int, min_hits: int
) -> None:
    drafter = NgramMapK4V(n, m, min_hits, 1)
    slot = began(drafter, tokens)
    places = places_of(tokens, after, n)
    place, values = outweighing(tokens, places, m)
    found = drafter.draft([Want(slot, 8, after)])[0]
    if place < 0 or len(places) < min_hits:
        assert not found
        return
    assert list(found.token_ids) == continued(tokens, after, place, m)
    best = tokens[place : place + m]
    for at, share in enumerate(found.survival):
        alike = [(known, count) for known, count in values if known[:at] == best[:at]]
        if at >= len(best):
            alike = [(known, count) for known, count in values if known == best]
        n_next = sum(count for known, count in alike if known[: at + 1] == best[: at + 1])
        assert share == pytest.approx((n_next + 1) / (sum(count for _, count in alike) + 2))


def test_map_k4v_copies_from_the_majority_and_not_from_the_match() -> None:
    tokens = [1, 2, 5, 6, 9, 1, 2, 5, 6, 8, 1, 2, 7, 7, 7, 1, 2]
    drafter = NgramMapK4V(2, 2, 1, 1)
    found = drafter.draft([Want(began(drafter, tokens), 8)])[0]
    assert list(found.token_ids) == [5, 6]
    assert found.survival == pytest.approx([3 / 5, 3 / 4])
    newest = NgramMapK(2, 2, 1, 1)
    assert guess(newest, began(newest, tokens)) == [7, 7]


def test_map_k4v_says_nothing_where_continuations_are_even() -> None:
    drafter = NgramMapK4V(2, 2, 1, 1)
    assert guess(drafter, began(drafter, [1, 2, 5, 6, 1, 2, 7, 7, 1, 2])) == []


def test_map_k4v_counts_a_continuation_that_is_cut_off_for_the_one_it_begins() -> None:
    # After "1": "1 2 3" once whole and "1" at the end, cut off: two against the one "4 5 6".
    drafter = NgramMapK4V(1, 3, 1, 1)
    slot = began(drafter, [1, 1, 2, 3, 9, 8, 1, 1])
    assert guess(drafter, slot)[:3] == [1, 2, 3]


@pytest.mark.parametrize("make", MAKERS)
def test_state_is_that_of_a_drafter_that_saw_the_text_at_once(make: Callable[[], Copying]) -> None:
    step = st.tuples(
        st.integers(0, 1),
        st.one_of(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 12)),
    )

    @settings(max_examples=60, deadline=None)
    @given(tokens_of, tokens_of, st.lists(step, max_size=12), afters)
    def check(
        one: list[int], two: list[int], steps: list[tuple[int, list[int] | int]], after: list[int]
    ) -> None:
        drafter = make()
        slots = [began(drafter, one, 0), began(drafter, two, 1)]
        for which, change in steps:
            slot = slots[which]
            if isinstance(change, int):
                slot.truncate(len(slot.tokens) - change)
                drafter.begin(slot)
            else:
                guess(drafter, slot, 4, after)
                keep(drafter, slot, change)
        for slot in slots:
            fresh = make()
            again = began(fresh, list(slot.tokens), slot.id)
            assert state(drafter, slot) == state(fresh, again)
            assert guess(drafter, slot, 8, after) == guess(fresh, again, 8, after)

    check()


@pytest.mark.parametrize("make", MAKERS)
def test_text_is_gone_when_its_request_ends_and_when_the_next_begins(make: Callable[[], Copying]) -> None:
    drafter = make()
    slot = began(drafter, [1, 2, 3, 1, 2, 3, 1, 2])
    assert guess(drafter, slot)
    drafter.end(slot)
    assert links(drafter._seen[0]) == [{}]
    assert guess(drafter, began(drafter, [1, 2])) == []
    drafter.begin(slot)
    drafter.begin(slot_of([1, 2]))
    assert guess(drafter, slot_of([1, 2])) == []


def use(which: int) -> None:
    """Fails if using a drafter compiles what building it did not."""

    def n_compiled() -> list[int]:
        values = vars(occurrences).values()
        return [len(value.signatures) for value in values if hasattr(value, "signatures")]

    drafter = MAKERS[which]()
    built = n_compiled()
    assert len(built) > 8
    for text in ([*range(300), 0, 1], [1, 2, 3] * 800, [1], [1, 2]):
        slot = began(drafter, text)
        guess(drafter, slot, 1)
        keep(drafter, slot, [3, 1, 2, 3, 1, 2])
        guess(drafter, slot, 16, [3, 1, 2])
        drafter.end(slot)
    assert n_compiled() == built


@pytest.mark.parametrize("make", MAKERS)
def test_a_text_that_became_shorter_unannounced_is_learnt_anew(make: Callable[[], Copying]) -> None:
    drafter = make()
    slot = began(drafter, [1, 2])
    keep(drafter, slot, [3, 1, 2])
    assert guess(drafter, slot)
    slot.truncate(2)
    assert guess(drafter, slot) == []


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_provisional_is_not_learnt(make: Callable[[], Copying]) -> None:
    drafter = make()
    slot = began(drafter, [4, 5, 6])
    assert guess(drafter, slot, after=[1, 2, 3, 1, 2]) == []
    assert guess(drafter, slot, after=[1, 2]) == []
    assert guess(drafter, slot, after=[4, 5])[:1] == [6]


@pytest.mark.parametrize("maker", [NgramSimple, NgramMapK, NgramMapK4V])
def test_requests_may_ask_for_other_sizes(maker: Callable[[int, int, int, int], Drafter]) -> None:
    drafter = maker(6, 8, 1, 1)
    slot = slot_of([1, 2, 3, 9, 8, 1, 2, 3, 9, 7, 1, 2])

    def asked(**sizes: int) -> list[int]:
        slot.speculate = replace(slot.speculate, **sizes)  # type: ignore[arg-type]
        drafter.begin(slot)
        return guess(drafter, slot)

    assert asked() == []
    assert asked(ngram_size_n=2, ngram_size_m=2) == [3, 9]
    assert asked(ngram_size_n=2, ngram_size_m=1, ngram_min_hits=2) == [3]
    assert asked(ngram_size_n=2, ngram_size_m=1, ngram_min_hits=3) == []


def judged(drafter: NgramMapK, slot: Slot, is_accepted: bool, n_before: int) -> int:
    """Verify the drafter's guess behind `n_before` tokens of another; how many tokens it guessed.

    The slot is left as it was, so that the same n-gram is asked for again.
    """
    other, n_tokens = slot.tokens[:1] * n_before, len(slot.tokens)
    token_ids = guess(drafter, slot, 64, other)
    draft = Draft([*other, *token_ids], ["other"] * n_before + [drafter.name] * len(token_ids))
    n_accepted = len(draft) if is_accepted else n_before
    keep(drafter, slot, [*draft.token_ids[:n_accepted], 99], draft, n_accepted)
    slot.truncate(n_tokens)
    drafter._seen[slot.id].clear()
    return len(token_ids)


@pytest.mark.parametrize("maker", [NgramMapK, NgramMapK4V])
@pytest.mark.parametrize("n_before", [0, 2])
def test_maps_draft_as_far_as_copies_held_and_come_back(maker: type[NgramMapK], n_before: int) -> None:
    drafter = maker(2, 16, 1, 1)
    slot = began(drafter, [0, 0, *range(20, 60), 0, 0])
    assert judged(drafter, slot, True, n_before) == 16
    assert [judged(drafter, slot, False, n_before) for _ in range(6)] == [16, 8, 4, 2, 2, 2]
    lengths = [judged(drafter, slot, True, n_before) for _ in range(12)]
    assert lengths[:2] == [2, 2]
    assert all(b >= a for a, b in pairwise(lengths))
    assert lengths[-1] == 16


@pytest.mark.parametrize("maker", [NgramMapK, NgramMapK4V])
def test_maps_learn_nothing_from_drafts_of_others_or_tokens_never_reached(
    maker: type[NgramMapK],
) -> None:
    drafter = maker(2, 16, 1, 1)
    slot = began(drafter, [0, 0, *range(20, 60), 0, 0])
    keep(drafter, slot, [20], Draft([7] * 4, ["other"] * 4), 0)
    keep(drafter, slot, [21], Draft([7] * 4, ["other"] * 2 + [drafter.name] * 2), 0)
    assert drafter._held == [{}]
    keep(drafter, slot, [22, 23], Draft([22, 8, 24], ["other"] + [drafter.name] * 2), 1)
    assert list(drafter._held[0].values()) == [8.0]
    drafter.begin(slot)
    assert drafter._held == [{}]


def test_a_map_drops_no_length_for_drafts_that_were_cut_short_and_held() -> None:
    drafter = NgramMapK(2, 16, 1, 1)
    slot = began(drafter, [0, 0, *range(20, 60), 0, 0])
    for _ in range(5):
        assert guess(drafter, slot, 1) == [20]
        keep(drafter, slot, [20, 21], Draft([20], [drafter.name]), 1)
        slot.truncate(slot.n_prompt)
        drafter._seen[slot.id].clear()
    assert len(guess(drafter, slot, 64)) == 16


@quick
@given(tokens_of, afters, st.integers(1, 3), st.integers(0, 6), st.integers(1, 8))
def test_mod_follows_the_last_follower_of_each_run(
    tokens: list[int], after: list[int], n_match: int, n_min: int, n_max: int
) -> None:
    drafter = NgramMod(n_match, n_min, 6, 1)
    followers = {tuple(tokens[i - n_match : i]): tokens[i] for i in range(n_match, len(tokens))}
    text = (tokens + after)[-n_match:]
    n_most, expected = min(6, n_max), []
    while len(expected) < n_most and len(text) == n_match and tuple(text) in followers:
        expected.append(followers[tuple(text)])
        text = [*text, expected[-1]][1:]
    if len(expected) < min(n_min, n_most):
        expected = []
    assert guess(drafter, began(drafter, tokens), n_max, after) == expected


def test_mod_lowers_its_least_length_to_what_the_request_may_draft() -> None:
    drafter = NgramMod(2, 5, 8, 1)
    text = [1, 2, 3, 4, 5, 1, 2]
    assert guess(drafter, began(drafter, text), 8) == [3, 4, 5, 1, 2, 3, 4, 5]
    short = [1, 2, 3, 4, 9, 4, 9, 1, 2]
    end = [7, 1, 2, 3, 4, 7, 7, 1, 2]
    for tokens in (text, short, end):
        slot = slot_of(tokens, n_max=2)
        drafter.begin(slot)
        assert guess(drafter, slot, 2) == [3, 4]
    # Two tokens are known to follow, and five are wanted where eight may be drafted.
    dead_end = slot_of([1, 2, 3, 4, 5, 6, 7, 8])
    drafter.begin(dead_end)
    assert guess(drafter, dead_end, 8, [5, 6]) == []
    assert guess(drafter, dead_end, 8, [2, 3]) == [4, 5, 6, 7, 8]


def test_synthetic_guesses_all_it_may_by_seed_and_position_and_never_an_end() -> None:
    drafter = Synthetic(8, frozenset({0, 3}))
    slot = slot_of([1, 2, 3])
    found = guess(drafter, slot, 400)
    assert set(found) == {1, 2, 4, 5, 6, 7}
    assert guess(drafter, slot, 400) == found
    assert guess(drafter, slot, 300, [5] * 100) == found[100:]
    slot.append(6)
    assert guess(drafter, slot, 100) == found[1:101]
    slot.sampling = replace(slot.sampling, seed=2**64 - 1)
    assert guess(drafter, slot, 100) != found[1:101]
    assert max(np.bincount(found)) < 2 * 400 / 6
    with pytest.raises(ValueError, match="all 2 tokens"):
        Synthetic(2, frozenset({0, 1}))
