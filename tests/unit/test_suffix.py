"""suffix against a plain search of its definition; what finished outputs of other requests may and may not do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.api import Request
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_DRAFT, Guess, Kept, Want
from slipstream.engine.speculate.text import occurrences, shared_history, suffix
from slipstream.engine.speculate.text.shared_history import SharedHistory
from slipstream.engine.speculate.text.suffix import LENGTHS, LONGEST, VOTERS, Suffix
from tests.unit.links import links
from tests.unit.toy import toy_slot


def slot_with(tokens: list[int], n_prompt: int | None = None, *, slot_id: int = 0, tenant: str = "") -> Slot:
    slot = toy_slot("r", tokens[:n_prompt], slot_id=slot_id)
    slot.request = replace(slot.request, tenant=tenant)
    slot.tokens += tokens[len(slot.tokens) :]
    return slot


def places_of(text: list[int], context: list[int]) -> list[int]:
    """The newest places of the longest of the run lengths that has any."""
    for length in reversed(LENGTHS):
        run = context[len(context) - length :]
        places = [end for end in range(len(text) - 1, length - 1, -1) if text[end - length : end] == run]
        if len(context) >= length and places:
            return places[:VOTERS]
    return []


def match_of(text: list[int], context: list[int], place: int) -> int:
    n = 0
    while n < min(LONGEST, place, len(context)) and text[place - 1 - n] == context[-1 - n]:
        n += 1
    return n


def search(text: list[int], after: list[int], n_max: int) -> tuple[list[int], list[float]]:
    """The guess by its definition, everything looked up in lists."""
    context = text + after
    voters = [(place, match_of(text, context, place)) for place in places_of(text, context)]
    token_ids, survival = list[int](), list[float]()
    while voters and len(token_ids) < n_max:
        known = context + token_ids
        votes = [known[place + len(token_ids)] for place, _ in voters]
        weights: dict[int, int] = {}
        for vote, (_, match) in zip(votes, voters, strict=True):
            weights[vote] = weights.get(vote, 0) + match**2
        token = max(weights, key=lambda vote: weights[vote])  # the first of equals: the newest place's
        against = sum(weights.values()) - weights[token]
        voters = [voter for voter, vote in zip(voters, votes, strict=True) if vote == token]
        longest = max(match for _, match in voters)
        evidence = float((longest + len(token_ids)) * len(voters))
        odds = (
            weights[token] / (3.0 * against) if against else evidence * math.sqrt(math.sqrt(evidence)) / 3.0
        )
        survives = odds / (1.0 + odds)
        if math.prod([*survival, survives]) < 0.05 or len(token_ids) >= 2 * longest + 4:
            break
        token_ids.append(token)
        survival.append(survives)
    return token_ids, survival


def guess(drafter: Suffix, slot: Slot, n_max: int = 8, after: tuple[int, ...] = ()) -> Guess:
    return drafter.draft([Want(slot, n_max, after)])[0]


texts = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n - 1), min_size=1, max_size=90))
afters = st.lists(st.integers(0, 3), max_size=6)
DRAFTER = Suffix(2)
ROOT = Path(__file__).parents[2]


@settings(max_examples=300, deadline=None)
@given(texts, afters, st.integers(1, 40))
def test_a_guess_is_what_the_definition_says(text: list[int], after: list[int], n_max: int) -> None:
    slot = slot_with(text)
    DRAFTER.begin(slot)
    found = guess(DRAFTER, slot, n_max, tuple(after))
    token_ids, survival = search(text, after, n_max)
    assert list(found.token_ids) == token_ids
    assert list(found.survival) == survival


@settings(max_examples=60, deadline=None)
@given(texts, st.lists(st.tuples(st.sampled_from(["keep", "ask", "cut", "restart"]), afters), max_size=8))
def test_a_life_of_steps_leaves_what_a_fresh_start_has(
    prompt: list[int], steps: list[tuple[str, list[int]]]
) -> None:
    slot = slot_with(prompt)
    DRAFTER.begin(slot)
    for step, tokens in steps:
        if step == "keep":
            slot.tokens.extend(tokens)
            DRAFTER.accept([Kept(slot, NO_DRAFT, 0)])
        elif step == "ask":
            guess(DRAFTER, slot, 4, tuple(tokens))
        elif step == "cut":
            slot.truncate(len(slot.tokens) - len(tokens))
            DRAFTER.begin(slot)
        else:
            DRAFTER.begin(slot)
    fresh = slot_with(list(slot.tokens), slot_id=1)
    DRAFTER.begin(fresh)
    guess(DRAFTER, slot)
    assert links(DRAFTER._seen[0]) == links(DRAFTER._seen[1])
    assert guess(DRAFTER, slot, 16) == guess(DRAFTER, fresh, 16)


def test_the_longer_match_outweighs_the_newer_one() -> None:
    text = [1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 9, 4, 70, 1, 2, 3, 4]
    slot = slot_with(text)
    DRAFTER.begin(slot)
    assert guess(DRAFTER, slot, 1).token_ids == [50]


def test_a_loop_is_drafted_as_long_as_asked_for() -> None:
    slot = slot_with([5, 6, 7] * 20)
    DRAFTER.begin(slot)
    found = guess(DRAFTER, slot, 40)
    assert list(found.token_ids) == ([5, 6, 7] * 20)[:40]
    assert min(found.survival) > 0.95


def test_one_matching_token_is_believed_less_than_many() -> None:
    short, long = slot_with([1, 2, 3, 4, 5, 1]), slot_with([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5])
    survivals = []
    for slot in (short, long):
        DRAFTER.begin(slot)
        survivals.append(guess(DRAFTER, slot, 1).survival[0])
    assert survivals[0] < 0.3 < 0.6 < survivals[1]


def finish(drafter: Suffix, prompt: list[int], output: list[int], tenant: str = "") -> None:
    slot = slot_with(prompt + output, len(prompt), tenant=tenant)
    drafter.begin(slot)
    drafter.end(slot)


def asked(drafter: Suffix, tokens: list[int], tenant: str = "", n_max: int = 8) -> list[int]:
    slot = slot_with(tokens, slot_id=1, tenant=tenant)
    drafter.begin(slot)
    return list(guess(drafter, slot, n_max).token_ids)


OUTPUT = list(range(100, 140))


def test_nothing_outlives_a_request_unless_outputs_are_shared() -> None:
    drafter = Suffix(2)
    finish(drafter, [1, 2, 3], OUTPUT)
    assert links(drafter._seen[0]) == [{}] * len(LENGTHS)
    assert asked(drafter, [1, 2, 3, 104, 105, 106, 107]) == []


def test_a_finished_output_is_drafted_from_and_ends_where_it_ended() -> None:
    drafter = Suffix(2, SharedHistory(4096, "all"))
    finish(drafter, [1, 2, 3], OUTPUT)
    finish(drafter, [1, 2, 3], list(range(200, 240)))
    assert asked(drafter, [7, *OUTPUT[:10]]) == OUTPUT[10:18]
    assert asked(drafter, [7, *OUTPUT[:37]]) == OUTPUT[37:]
    assert asked(drafter, [1, 2, 3]) == []  # prompts are not shared


def test_the_own_text_has_precedence_where_it_matches_as_far() -> None:
    drafter = Suffix(2, SharedHistory(4096, "all"))
    finish(drafter, [1], OUTPUT)
    own = [*OUTPUT[:5], 300, 301, 302, 303]
    assert asked(drafter, [*own, *OUTPUT[:5]], n_max=2) == [300, 301]
    assert asked(drafter, [7, *OUTPUT[1:5], 300, 301, 302, 303, *OUTPUT[:5]], n_max=2) == OUTPUT[5:7]


@pytest.mark.parametrize("collide", [False, True])
def test_tenants_never_see_each_other(collide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if collide:
        monkeypatch.setattr(shared_history, "salt_of", lambda key: 7)
    drafter = Suffix(2, SharedHistory(4096, "tenant"))
    finish(drafter, [1], OUTPUT, tenant="a")
    finish(drafter, [1], [*OUTPUT[:10], *range(300, 330)], tenant="b")
    assert asked(drafter, [7, *OUTPUT[:10]], tenant="a", n_max=3) == OUTPUT[10:13]
    assert asked(drafter, [7, *OUTPUT[:10]], tenant="b", n_max=3) == [300, 301, 302]
    assert asked(drafter, [7, *OUTPUT[:10]], tenant="c") == []
    assert asked(drafter, [7, *OUTPUT[:10]]) == []


def test_in_mode_all_a_tenant_does_not_matter() -> None:
    drafter = Suffix(2, SharedHistory(4096, "all"))
    finish(drafter, [1], OUTPUT, tenant="a")
    assert asked(drafter, [7, *OUTPUT[:10]], tenant="b", n_max=3) == OUTPUT[10:13]
    with pytest.raises(ValueError, match="everybody"):
        SharedHistory(4096, "everybody")


def document(i: int, n: int = 100) -> np.ndarray:
    return np.arange(1000 * i, 1000 * i + n, dtype=np.int32)


def kept(shared: SharedHistory, n: int, key: str = "") -> list[int]:
    """Which of the first n documents can be found."""
    return [i for i in range(n) if len(shared.find(key, document(i)[:50], 1).places)]


def test_the_least_recently_used_are_forgotten_first() -> None:
    shared = SharedHistory(1000, "all")
    for i in range(10):
        shared.add("", document(i))
    shared.use(shared.find("", document(2)[:50], 1))
    assert kept(shared, 11) == list(range(10))
    shared.add("", document(10))
    assert kept(shared, 11) == [2, 6, 7, 8, 9, 10]
    found = shared.find("", document(7)[:50], 4)
    assert found.text[found.places[0]] == 7050
    assert found.text[found.spans[0, 0] : found.spans[0, 1]].tolist() == document(7).tolist()


def test_what_is_kept_is_what_was_added_and_is_bounded() -> None:
    rng, shared, capacity = np.random.default_rng(3), SharedHistory(3000, "tenant"), 3000
    added = list[tuple[str, np.ndarray]]()
    while sum(len(text) for _, text in added) < 10 * capacity:
        key = "abc"[rng.integers(3)]
        added.append((key, rng.integers(0, 50, rng.integers(16, 400)).astype(np.int32)))
        shared.add(*added[-1])
        assert shared.n_tokens <= capacity
    assert shared.n_tokens >= capacity // 2
    n = len(shared._documents)
    for (key, text), one in zip(added[-n:], shared._documents, strict=True):
        assert shared._text[one.start : one.end].tolist() == text.tolist()
        found = shared.find(key, text[:-1], 16)
        assert one.end - 1 in found.places
        assert {document.key for document in found.documents} == {key}


def test_very_short_outputs_are_not_kept_and_of_very_long_ones_the_end() -> None:
    shared = SharedHistory(1000, "all")
    shared.add("", document(1, 15))
    assert shared.n_tokens == 0
    shared.add("", document(2, 900))
    assert shared.n_tokens == 250
    assert shared._text[:250].tolist() == document(2, 900)[-250:].tolist()


def use() -> None:
    """Fails if using a drafter compiles what building it did not."""
    members = [one for module in (suffix, occurrences) for one in vars(module).values()]
    functions = [one for one in members if hasattr(one, "py_func")]
    drafter = Suffix(2, SharedHistory(1000, "tenant"))
    made = [len(one.signatures) for one in functions]
    for i in range(12):  # past the capacity
        finish(drafter, [1, 2], document(i % 9).tolist(), tenant="a")
    assert asked(drafter, document(5)[:50].tolist(), tenant="a")
    slot = slot_with([1, 2, 3, 1])
    drafter.begin(slot)
    assert guess(drafter, slot, 4, (2,)).token_ids
    assert sum(made) > 0
    assert made == [len(one.signatures) for one in functions]


def test_the_key_of_a_request() -> None:
    request = Request(id="r", prompt=(1,), tenant="a")
    assert [SharedHistory(1000, mode).key(request) for mode in ("tenant", "all")] == ["a", ""]
