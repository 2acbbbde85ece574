"""Where a prompt goes: to the replica that has had most of it, unless that is too busy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.engine.api import Chat, Image, Infill, Prompt, Request
from slipstream.server.cluster import affinity
from slipstream.server.cluster.affinity import Affinity

N_SLOTS = 3
IDLE = {"a": 0, "b": 0, "c": 0}
ASK = Request(id="one", prompt="x" * 1000)


def chat(*texts: str) -> Chat:
    return Chat([{"role": "user", "content": one} for one in texts])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("x" * 1000, "x" * 900 + "y" * 500),
        (chat("x" * 500, "yes"), chat("x" * 500, "yes", "and more of it" * 30)),
        (Infill("x" * 600, "s"), Infill("x" * 600 + "y", "s")),
        (tuple(range(300)), (*range(290), 5)),
    ],
)
def test_a_prompt_goes_where_its_beginning_is(first: Prompt, second: Prompt) -> None:
    known = Affinity(N_SLOTS)
    usual = known.choose(replace(ASK, prompt=second), IDLE)
    for name in IDLE:
        known.note(replace(ASK, prompt=first), name)
        assert known.choose(replace(ASK, prompt=second), IDLE) == [
            name,
            *(one for one in usual if one != name),
        ]


def test_the_longest_beginning_counts() -> None:
    known = Affinity(N_SLOTS)
    known.note(replace(ASK, prompt="x" * 1000), "a")
    known.note(replace(ASK, prompt="x" * 500 + "y" * 500), "b")
    assert known.choose(replace(ASK, prompt="x" * 900), IDLE)[0] == "a"
    assert known.choose(replace(ASK, prompt="x" * 500 + "y" * 400), IDLE)[0] == "b"


def test_a_replica_where_it_would_wait_longer_is_left() -> None:
    known = Affinity(N_SLOTS)
    known.note(ASK, "a")
    assert known.choose(ASK, {"a": N_SLOTS - 1, "b": 0, "c": 2})[0] == "a"
    assert known.choose(ASK, {"a": N_SLOTS, "b": 1, "c": 2}) == ["b", "c", "a"]
    assert known.choose(ASK, {"a": N_SLOTS, "b": N_SLOTS - 1, "c": N_SLOTS})[0] == "b"
    assert known.choose(ASK, {"a": 2 * N_SLOTS, "b": 2 * N_SLOTS, "c": 2 * N_SLOTS + 1})[0] == "a"


def test_one_that_is_gone_is_forgotten_and_tenants_share_nothing() -> None:
    known = Affinity(N_SLOTS)
    known.note(ASK, "gone")
    assert set(known.choose(ASK, IDLE)) == set(IDLE)
    loads = {"a": 1, "b": 0}
    known.note(ASK, "a")
    assert known.choose(ASK, loads)[0] == "a"
    assert known.choose(replace(ASK, tenant="another"), loads)[0] == "b"


def test_routers_that_share_nothing_agree_and_new_prompts_are_spread() -> None:
    asked = [replace(ASK, prompt=f"{i} " * 300) for i in range(60)]
    firsts = [Affinity(N_SLOTS).choose(one, IDLE)[0] for one in asked]
    assert firsts == [Affinity(N_SLOTS).choose(one, dict(reversed(IDLE.items())))[0] for one in asked]
    assert min(firsts.count(name) for name in IDLE) >= 10
    # A replica more moves no prompt from one of the others to another of them.
    more = [Affinity(N_SLOTS).choose(one, {**IDLE, "d": 0})[0] for one in asked]
    assert all(new in (old, "d") for old, new in zip(firsts, more, strict=True))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "_MOST_BLOCKS", 10)
    known = Affinity(N_SLOTS)
    for i in range(30):
        known.note(replace(ASK, prompt=f"{i} " * 300), "a")
    assert len(known._homes) == 10


def test_half_a_pair_of_code_units_is_no_trouble() -> None:
    assert Affinity(N_SLOTS).choose(replace(ASK, prompt="\ud800" * 300), IDLE)


def test_images_are_part_of_a_prompt() -> None:
    """The same question about the same image goes where it was asked before; about another, where that was."""
    known = Affinity(N_SLOTS)
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in it? " * 20}]}
    asks = [
        replace(ASK, prompt=Chat([turn], images=(Image(1, 1, bytes([shade] * 3)),))) for shade in range(3)
    ]
    for ask, name in zip(asks, IDLE, strict=True):
        known.note(ask, name)
    assert [known.choose(ask, IDLE)[0] for ask in asks] == list(IDLE)
