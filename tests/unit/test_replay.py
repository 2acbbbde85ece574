"""Replies that go on behind an earlier run's tokens, on a toy network: beside others, short of pages, passes ahead."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from slipstream.engine.api import Delta, Done, Event
from slipstream.engine.speculate.network.draft_model import DraftModel
from tests.unit.toy import Toy, ToyNetwork, toy_engine, toy_slot

PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8], "c": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}
Tokens = dict[str, list[int]]


def add(toy: Toy, name: str, emitted: tuple[int, ...] = (), max_tokens: int = 20) -> None:
    types = ("draft-model",)
    toy.engine.add(toy_slot(name, PROMPTS[name], types=types, emitted=emitted, max_tokens=max_tokens))


def play(toy: Toy, emitted: Mapping[str, tuple[int, ...]]) -> tuple[Tokens, dict[str, Done]]:
    """All three requests to their ends, some behind tokens that there are: what is new of each, and its end."""
    for name in PROMPTS:
        add(toy, name, emitted.get(name, ()))
    tokens: Tokens = {name: [] for name in PROMPTS}
    ends = {}
    while toy.engine.busy:
        for name, event in toy.engine.step():
            assert name not in ends, "an event after the last one"
            if isinstance(event, Delta):
                assert event.token_ids
                tokens[name] += event.token_ids
            else:
                assert isinstance(event, Done), event
                ends[name] = event
    assert toy.engine.stats().n_pages_held == 0
    return tokens, ends


def engine(**options: object) -> Toy:
    make = lambda cache: [DraftModel(ToyNetwork(agreement=0.6), cache, 16, 64)]  # type: ignore  # noqa: E731
    return toy_engine(make, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> Tokens:
    return play(toy_engine(), {})[0]


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("n_pages", [64, 12])  # with 12, slots are preempted too
def test_they_are_what_they_would_have_been(expected: Tokens, n_pages: int, *, overlaps: bool) -> None:
    n_preempted = 0
    for n in range(1, 21):
        cuts = {"a": n, "b": 20 - n // 2, "c": max(0, n - 5)}
        had = {name: tuple(expected[name][:cut]) for name, cut in cuts.items()}
        toy = engine(n_slots=3, n_pages=n_pages, overlaps=overlaps)
        tokens, ends = play(toy, had)
        assert {name: [*had[name], *tokens[name]] for name in PROMPTS} == expected
        assert [ends[name].usage.n_completion for name in PROMPTS] == [20, 20, 20]
        assert [ends[name].usage.n_prompt for name in PROMPTS] == [7, 2, 11]
        n_preempted += toy.engine.stats().n_preempted
    assert bool(n_preempted) == (n_pages == 12)


def test_what_one_run_has_stored_another_adopts(expected: Tokens) -> None:
    """Its pages hold tokens of the reply too, which are no cached tokens of a prompt."""
    toy = engine(n_slots=3)
    play(toy, {})
    n_passes = toy.target.n_passes
    tokens, ends = play(toy, {"c": tuple(expected["c"][:18])})
    assert tokens["c"] == expected["c"][18:]
    assert ends["c"].usage.n_cached == 11
    assert toy.target.n_passes > n_passes


def test_a_reply_that_is_over_needs_no_pass(expected: Tokens) -> None:
    toy = toy_engine()
    add(toy, "a", tuple(expected["a"]))
    ((name, end),) = toy.engine.step()
    assert isinstance(end, Done)
    assert (name, end.reason, end.usage.n_completion) == ("a", "length", 20)
    assert toy.target.n_passes == 0
    assert not toy.engine.busy
    assert toy.engine.stats().n_pages_held == 0


def test_enough_may_be_said_before_it_goes_on(expected: Tokens) -> None:
    toy = toy_engine()
    add(toy, "a", tuple(expected["a"][:5]))
    assert toy.engine.finish("a") == [], "it has no slot yet"
    events: list[tuple[str, Event]] = toy.engine.step()
    events += toy.engine.finish("a")
    last = events[-1][1]
    assert isinstance(last, Done)
    assert last.reason == "stop"
    assert last.usage.n_completion >= 5
