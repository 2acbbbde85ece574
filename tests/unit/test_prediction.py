"""prediction: following, getting in step again, replacements, and that steps leave no trace."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_DRAFT, NO_GUESS, Guess, Kept, Want
from slipstream.engine.speculate.text import prediction
from slipstream.engine.speculate.text.prediction import Prediction
from tests.unit.toy import toy_slot

DRAFTER = Prediction(2)
ROOT = Path(__file__).parents[2]
TEXT = list(range(100, 200))


def predicting(
    prediction: list[int], output: list[int], slot_id: int = 0, prompt: tuple[int, ...] = (1, 2)
) -> Slot:
    slot = toy_slot("r", list(prompt), slot_id=slot_id)
    slot.prediction = tuple(prediction)
    slot.tokens += output
    DRAFTER.begin(slot)
    return slot


def guess(slot: Slot, n_max: int = 6, after: tuple[int, ...] = ()) -> Guess:
    return DRAFTER.draft([Want(slot, n_max, after)])[0]


def drafted(prediction: list[int], output: list[int], n_max: int = 6) -> list[int]:
    return list(guess(predicting(prediction, output), n_max).token_ids)


@pytest.mark.parametrize("n_output", [0, 1, 40, 97])
def test_it_follows_the_prediction(n_output: int) -> None:
    found = guess(predicting(TEXT, TEXT[:n_output]))
    assert list(found.token_ids) == TEXT[n_output : n_output + 6]
    assert min(found.survival) > 0.97


def test_it_says_nothing_without_a_prediction_past_its_end_or_behind_another_draft() -> None:
    assert guess(predicting([], [5, 6])) == NO_GUESS
    assert drafted(TEXT, TEXT) == []
    assert guess(predicting(TEXT, TEXT[:5]), 6, (105,)) == NO_GUESS


@pytest.mark.parametrize(
    ("output", "following"),
    [
        ([*TEXT[:20], 9], 121),  # one token put in another's place
        ([*TEXT[:20], 9, 8], 122),
        ([*TEXT[:20], 9, 8, 120], 121),  # two put in
        ([*TEXT[:20], 121], 122),  # one left out
        ([*TEXT[:20], 140, 141, 142], 143),  # many left out
        ([*TEXT[:20], *TEXT[85:90]], 190),  # so many that only the index finds it
        ([*TEXT[:60], *TEXT[10:20]], 120),  # back to something earlier
        ([*range(30), *TEXT[50:56]], 156),  # nothing right at first
    ],
)
def test_it_gets_in_step_again(output: list[int], following: int) -> None:
    assert drafted(TEXT, output, 3) == [following, following + 1, following + 2]


def test_of_equal_places_the_one_ahead_is_taken() -> None:
    prediction = [1, 2, 3, 4, 50, *TEXT[:30], 1, 2, 3, 4, 60, *TEXT[30:50], 1, 2, 3, 4, 70]
    assert drafted(prediction, [1, 2, 3, 4, 50, *TEXT[:10], 9, 1, 2, 3, 4], 1) == [60]


def test_less_evidence_less_survival() -> None:
    survivals = [
        guess(predicting(TEXT, [*TEXT[:20], 9, *TEXT[21 : 21 + n]]), 1).survival[0] for n in range(10)
    ]
    assert survivals == sorted(survivals)
    assert survivals[0] < 0.5 < 0.98 < survivals[-1]


def test_after_a_long_stretch_of_its_own_the_text_is_left_alone() -> None:
    assert drafted(TEXT, [*TEXT[:20], *range(30)]) == []


def test_what_replaced_what_is_drafted_the_next_time() -> None:
    prediction = [*TEXT[:12], 7, 50, 51, *TEXT[12:30], 7, 50, 51, *TEXT[30:40], 8, 50, 51, *TEXT[40:50]]
    output = [*TEXT[:12], 7, 60, 61, 62, *TEXT[12:30]]
    assert drafted(prediction, output, 8) == [7, 60, 61, 62, *TEXT[30:34]]
    assert drafted(prediction, [*output, 7, 60], 8) == [61, 62, *TEXT[30:36]]
    unproved = [*prediction[:33], 8, 50, 51, *TEXT[40:50]]
    assert drafted(unproved, output, 3) == [8, 50, 51]
    # Once it has proved right the token before it does not matter.
    later = [*output, 7, 60, 61, 62, *TEXT[30:40], 8]
    assert drafted(prediction, later, 8) == [60, 61, 62, *TEXT[40:45]]


def test_a_replacement_that_is_not_made_again_is_dropped() -> None:
    prediction = [*TEXT[:12], 7, 50, *TEXT[12:30], 7, 50, *TEXT[30:40], 7, 50, *TEXT[40:50]]
    output = [*TEXT[:12], 7, 60, *TEXT[12:30], 7, 50, *TEXT[30:40]]
    assert drafted(prediction, output, 4) == [7, 50, *TEXT[40:42]]


def test_a_replacement_that_goes_another_way_midway_is_left() -> None:
    prediction = [*TEXT[:12], 7, 50, *TEXT[12:30], 7, 50, *TEXT[30:50]]
    output = [*TEXT[:12], 7, 60, 61, 62, *TEXT[12:30], 7, 60, 99, *TEXT[30:34]]
    assert drafted(prediction, output, 3) == TEXT[34:37]
    assert drafted(prediction, output[:-4], 3) == TEXT[31:34]  # 60 and 99 stand for 50 and 130


def state(slot: Slot) -> list[list[int]]:
    one = DRAFTER._slots[slot.id]
    return [] if one is None else [part.tolist() for part in one.track]


def edited(text: list[int], places: list[int], rng: random.Random) -> list[int]:
    """A text with a token replaced, added or left out at each place."""
    text = list(text)
    for place in sorted((one for one in places if one < len(text)), reverse=True):
        text[place : place + rng.randrange(2)] = [rng.randrange(8) for _ in range(rng.randrange(3))]
    return text


small = st.lists(st.integers(0, 7), min_size=1, max_size=80)
steps = st.lists(
    st.tuples(st.sampled_from(["keep", "ask", "cut", "restart"]), st.integers(1, 9)), max_size=25
)


@settings(max_examples=150, deadline=None)
@given(small, st.lists(st.integers(0, 80), max_size=5), st.randoms(use_true_random=False), steps)
def test_a_life_of_steps_leaves_what_a_fresh_start_has(
    prediction: list[int], places: list[int], rng: random.Random, life: list[tuple[str, int]]
) -> None:
    target = edited(prediction, places, rng)
    slot = predicting(prediction, [])
    for step, n in life:
        done = len(slot.tokens) - slot.n_prompt
        if step == "keep":
            slot.tokens += target[done : done + n]
            DRAFTER.accept([Kept(slot, NO_DRAFT, 0)])
        elif step == "ask":
            found = guess(slot, n)
            assert len(found.survival) == len(found) <= n
            assert all(0 < survival < 1 for survival in found.survival)
        elif step == "cut":
            slot.truncate(len(slot.tokens) - n)
            DRAFTER.begin(slot)
        else:
            DRAFTER.begin(slot)
    fresh = predicting(prediction, slot.tokens[2:], slot_id=1)
    guess(slot)
    assert state(slot) == state(fresh)
    assert guess(slot, 16) == guess(fresh, 16)


def accepted_share(prediction: list[int], target: list[int], n_max: int) -> float:
    """The share of the target's tokens that were drafted and right."""
    slot, n_done, n_accepted = predicting(prediction, []), 0, 0
    while n_done < len(target):
        draft = guess(slot, n_max).token_ids
        n = next(
            (i for i, pair in enumerate(zip(draft, target[n_done:], strict=False)) if pair[0] != pair[1]),
            len(draft),
        )
        n = min(n, len(target) - n_done)
        slot.tokens += target[n_done : n_done + n + 1]
        n_done, n_accepted = n_done + n + 1, n_accepted + n
        DRAFTER.accept([Kept(slot, NO_DRAFT, n)])
    return n_accepted / len(target)


def test_nearly_all_of_a_right_prediction_and_most_of_an_edited_one_is_accepted() -> None:
    rng = random.Random(4)
    # Like text: few tokens are frequent, many rare.
    text = [min(2000, int(rng.paretovariate(0.6))) for _ in range(4000)]
    prediction = list(text)
    for place in reversed(range(len(text))):
        if rng.random() < 0.05:
            prediction[place : place + rng.randrange(2)] = [rng.choice(text)] * rng.randrange(2)
    assert accepted_share(text, text, 32) > 0.96
    assert accepted_share(text, text, 16) > 0.93
    assert accepted_share(prediction, text, 32) > 0.85


@pytest.mark.parametrize("period", [1, 7])
def test_a_prediction_that_repeats_itself_is_followed(period: int) -> None:
    prediction = (np.arange(3000) % period).tolist()
    assert drafted(prediction, prediction[:2000], 10) == prediction[2000:2010]
    assert drafted(prediction, [*prediction[:2000], 9, *prediction[2001:2010]], 4) == prediction[2010:2014]


def use() -> None:
    """Fails if using a drafter compiles what building it, which loading this module does, did not."""
    functions = [one for one in vars(prediction).values() if hasattr(one, "py_func")]
    made = [len(one.signatures) for one in functions]
    for output in (TEXT[:5], [*TEXT[:5], 9, *TEXT[6:20]], [*TEXT[:60], *TEXT[10:20]], []):
        assert guess(predicting(TEXT, output)).token_ids
    assert sum(made) > 0
    assert made == [len(one.signatures) for one in functions]


def test_the_end_of_a_request_leaves_nothing() -> None:
    slot = predicting(TEXT, TEXT[:5])
    DRAFTER.end(slot)
    assert state(slot) == []
    slot.prediction = ()
    assert guess(slot) == NO_GUESS
