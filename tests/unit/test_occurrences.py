"""The index of runs against a search by hand: places, growth in steps, documents, collisions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.engine.speculate.text import occurrences
from slipstream.engine.speculate.text.occurrences import Occurrences
from tests.unit.links import links


def array(tokens: list[int]) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def places(tokens: list[int], context: list[int], length: int) -> list[int]:
    """Every place of the context's last tokens, newest first, by looking everywhere."""
    if len(context) < length:
        return []
    run = context[len(context) - length :]
    return [end for end in range(len(tokens) - 1, length - 1, -1) if tokens[end - length : end] == run]


texts = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=50))
lengths = st.sets(st.integers(1, 9), min_size=1, max_size=3).map(sorted)


@settings(max_examples=200, deadline=None)
@given(texts, st.lists(st.integers(0, 3), max_size=3), lengths, st.integers(1, 60))
def test_places_are_those_found_by_looking_everywhere(
    tokens: list[int], after: list[int], runs: list[int], limit: int
) -> None:
    index = Occurrences(runs)
    index.learn(array(tokens))
    context = tokens + after
    length, found = index.longest(array(tokens), array(context), limit)
    longest = max((one for one in runs if places(tokens, context, one)), default=0)
    assert (length, found.tolist()) == (longest, places(tokens, context, longest)[:limit] if longest else [])


@settings(max_examples=100, deadline=None)
@given(texts, lengths, st.lists(st.integers(0, 50), max_size=8))
def test_learning_in_steps_is_learning_at_once(tokens: list[int], runs: list[int], steps: list[int]) -> None:
    grown, whole = Occurrences(runs), Occurrences(runs)
    for n in [*sorted(steps), len(tokens)]:
        grown.learn(array(tokens[:n]))
    whole.learn(array(tokens))
    assert links(grown) == links(whole)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(texts, st.integers(0, 2)), max_size=4), texts, st.integers(1, 4))
def test_no_run_crosses_from_one_document_into_another(
    documents: list[tuple[list[int], int]], context: list[int], length: int
) -> None:
    index, tokens, expected = Occurrences((length,)), list[int](), list[int]()
    for text, salt in documents:
        start = len(tokens)
        tokens += text
        index.learn(array(tokens), start, salt)
        if salt == 1:
            expected = [start + place for place in places(text, context, length)] + expected
    assert index.longest(array(tokens), array(context), 1000, salt=1)[1].tolist() == expected


def test_a_large_text_grows_the_index_and_keeps_every_place() -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 6, 20_000).astype(np.int32)
    grown, whole = Occurrences((2, 5)), Occurrences((2, 5))
    for n in range(0, 20_001, 500):
        grown.learn(tokens[:n])
    whole.learn(tokens)
    assert links(grown) == links(whole)
    found = grown.longest(tokens, tokens, 20_000)[1].tolist()
    assert found == places(tokens.tolist(), tokens.tolist(), 5)


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_loop_points_one_period_back(period: int) -> None:
    tokens = (np.arange(5000) % period).astype(np.int32)
    index = Occurrences((32,))
    index.learn(tokens)
    _, found = index.longest(tokens, tokens, 4)
    assert found.tolist() == [5000 - period * i for i in range(1, 5)]


def chain_of_one_hash(tokens: NDArray[np.int32]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """The table and links of a text's runs of two, put in as if all had the same hash."""
    newest, before = np.zeros(32, np.uint64), np.zeros(16, np.int32)
    for end in range(2, len(tokens)):
        occurrences._put.py_func(tokens, end, np.uint64(77), 2, newest, before)
    return newest, before


def test_runs_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = array([1, 2, 9, 3, 4, 8, 1, 2, 7, 3, 4])
    newest, before = chain_of_one_hash(tokens)
    assert {end: before[end] for end in np.flatnonzero(before)} == {8: 2}  # 1 2
    monkeypatch.setattr(occurrences, "_finish", lambda value, salt: np.uint64(77))
    find = occurrences._find.py_func
    assert find(tokens, tokens, 2, np.uint64(0), newest) == 5
    assert find(tokens, array([4, 1]), 2, np.uint64(0), newest) == 0


def test_after_equal_runs_the_next_ones_with_the_same_hash_are_told_apart() -> None:
    _, before = chain_of_one_hash(array([1, 2, 3, 9, 1, 2, 4, 8]))
    assert {end: before[end] for end in np.flatnonzero(before)} == {6: 2}  # 1 2, but 2 4 is not 2 3


def test_a_cleared_index_knows_nothing_and_learns_again() -> None:
    index, tokens = Occurrences((2,)), array([1, 2, 3, 1, 2])
    index.learn(tokens)
    index.clear()
    assert links(index) == [{}]
    assert index.longest(tokens, tokens, 4)[0] == 0
    index.learn(tokens)
    assert index.longest(tokens, tokens, 4)[1].tolist() == [2]


@pytest.mark.parametrize("runs", [(), (0, 1), (3, 2), (2, 2)])
def test_run_lengths_must_ascend(runs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Occurrences(runs)


def test_a_text_that_was_cut_is_learnt_anew() -> None:
    index, tokens = Occurrences((1, 2)), array([1, 2, 3, 1, 2, 4, 1, 2])
    index.learn(tokens)
    index.learn(tokens[:4])
    fresh = Occurrences((1, 2))
    fresh.learn(tokens[:4])
    assert links(index) == links(fresh)
