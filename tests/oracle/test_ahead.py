"""Drafts made on the device behind a pass that nobody has read, against those that the host asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Sampling, Speculate
from slipstream.engine.batch import Batch
from slipstream.engine.constraints import ThinkingBudget
from slipstream.engine.core.engine import Engine
from slipstream.engine.core.flight import Flight
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.asking import Asking
from slipstream.engine.speculate.drafter import DeviceDrafter, Draft, Guess, Kept, Want
from slipstream.engine.speculate.network.backlog import Backlog
from tests.checkpoints import tiny_checkpoint
from tests.oracle.lab import ASKS, DEMO, Bench, Case, Folders, Lab, play
from tests.oracle.lossless import demo_cases

pytestmark = pytest.mark.sampled(keep=3)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(DEMO, torch.float32)


@pytest.fixture(scope="module")
def cases(lab: Lab) -> list[Case]:
    """Hot enough that drafts are kept in part, and that noise of another place is another token."""
    asked = demo_cases(lab, "warm", 4)
    return [
        replace(one, sampling=Sampling(seed=i, temperature=1.3), speculate=Speculate(n_max=5), max_tokens=32)
        for i, one in enumerate(asked)
    ]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Flight]:
    """The passes that were launched behind unread passes."""
    seen: list[Flight] = []
    launch = Engine._launch

    def watched(self: Engine, unread: Flight | None = None) -> Flight | None:
        flight = launch(self, unread)
        seen.extend([flight] if unread is not None and flight is not None and any(flight.works) else [])
        return flight

    monkeypatch.setattr(Engine, "_launch", watched)
    return seen


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], list[Sequence[int]]]:
    """What was guessed, by request and tokens before."""
    seen: dict[tuple[str, int], list[Sequence[int]]] = defaultdict(list)
    offer = Chain._offer

    def watched(self: Chain, name: str, want: Want, guess: Guess) -> Draft:
        seen[want.slot.request.id, want.n_tokens].append(guess.token_ids)
        return offer(self, name, want, guess)

    monkeypatch.setattr(Chain, "_offer", watched)
    return seen


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("host_looks", [0, 3])
@pytest.mark.parametrize("name", ["draft-model", "draft-eagle3", "draft-mtp", "ngram-device"])
def test_a_network_guesses_ahead_what_it_guesses_when_it_is_asked(
    lab: Lab,
    cases: Sequence[Case],
    launched: list[Flight],
    guessed: dict[tuple[str, int], list[Sequence[int]]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    host_looks: int,
    captured: bool,
) -> None:
    """host_looks: every so many passes the host looks first, and the network goes on from what it guessed ahead."""
    turns, may_follow = count(1), Engine._may_follow

    def sometimes(self: Engine, flight: Flight) -> bool:
        return may_follow(self, flight) and not (host_looks and next(turns) % host_looks == 0)

    monkeypatch.setattr(Engine, "_may_follow", sometimes)
    bench = Bench((name,), adaptive=False, captured=captured)
    asked, made = (play(lab, replace(bench, overlaps=one), cases) for one in (False, True))
    assert made.tokens == asked.tokens
    assert sum(flight.drafts.call is not None for flight in launched) > 8
    twice = [one for one in guessed.values() if len(one) == 2]
    assert len(twice) > 12
    for (
        one,
        other,
    ) in twice:  # near a text's end drafts are shorter, by as much as the running pass might still keep
        n = min(len(one), len(other))
        assert list(one[:n]) == list(other[:n])


def test_passes_overlap_where_a_limit_of_thinking_is_far_or_over(
    lab: Lab, cases: Sequence[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapped: list[
        int
    ] = []  # tokens of the reply that were read when a pass was launched behind an unread one
    launch = Engine._launch

    def watched(self: Engine, unread: Flight | None = None) -> Flight | None:
        if unread is not None:
            overlapped.extend(work.slot.n_decoded for work in unread.works if work is not None)
        return launch(self, unread)

    monkeypatch.setattr(Engine, "_launch", watched)
    markers = ("", "# end\n")  # every reply begins with an opener of no characters
    closing = lab.tokenizer.encode(markers[1], add_special=False)
    for n_most in (150, 4):
        asks = replace(ASKS, thinking_budget=ThinkingBudget(n_most, markers))
        sampling = Sampling(seed=1, temperature=1.3, ignore_eos=True)
        limited = [replace(cases[0], max_tokens=n_most + 30, asks=asks, sampling=sampling)]
        plain = play(lab, Bench(), limited)
        assert plain.tokens[0][n_most : n_most + len(closing)] == closing
        overlapped.clear()
        made = play(lab, Bench(("draft-model",), adaptive=False, overlaps=True), limited)
        assert made.tokens == plain.tokens
        assert max(overlapped) >= n_most + len(closing)
        assert (min(overlapped) < n_most) == (n_most > 130)
        assert not [n for n in overlapped if n_most - 130 < n < n_most + len(closing)]


@pytest.mark.parametrize("name", ["draft-model", "draft-eagle3", "draft-mtp"])
def test_a_network_asked_seldom_catches_up_behind_an_unread_pass(
    lab: Lab,
    cases: Sequence[Case],
    guessed: dict[tuple[str, int], list[Sequence[int]]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """At the same place it guesses what it guesses when it is asked each time, and nothing is unread."""
    bench = Bench((name,), adaptive=False, captured=True)
    play(lab, bench, [replace(one, speculate=Speculate(n_max=1)) for one in cases])
    turns, asked, n_behind = count(), Asking.asked, []

    def seldom(self: Asking, drafter: DeviceDrafter, *rest: Any) -> Any:
        found = asked(self, drafter, *rest)
        if next(turns) % 3:
            return {}
        n_behind.extend(drafter.n_unfed(one.slot) for one in found if one.after)
        return found

    monkeypatch.setattr(Asking, "asked", seldom)
    play(lab, replace(bench, overlaps=True), cases)
    assert sum(n > 2 for n in n_behind) > 4, "it lacked something"
    twice = [one for one in guessed.values() if len(one) == 2]
    assert len(twice) > 4
    for one, other in twice:
        n = min(len(one), len(other))
        assert list(one[:n]) == list(other[:n])


@pytest.mark.parametrize("name", ["draft-eagle3", "draft-mtp"])
def test_what_is_kept_for_a_head_is_not_of_the_next_replay(
    lab: Lab,
    cases: Sequence[Case],
    launched: list[Flight],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Of a request that uses it, while it is not asked."""
    found: list[Tensor] = []
    note = Backlog.note

    def watched(self: Backlog, kept: Sequence[Kept]) -> None:
        note(self, kept)
        found.extend(self.states([(one.slot, range(one.start, one.slot.n_past)) for one in kept]))

    monkeypatch.setattr(Backlog, "note", watched)
    monkeypatch.setattr(Asking, "asked", lambda *args: {})
    bench = Bench((name,), adaptive=False, captured=True)
    play(lab, bench, cases[:1])
    meant, found = found, []
    play(lab, replace(bench, overlaps=True), cases[:1])
    assert len(launched) > 20
    assert len(found) == len(meant) > 20
    assert all(map(torch.equal, found, meant))


@pytest.mark.parametrize("types", [(), ("draft-model",)])
def test_states_that_a_pass_moves_are_those_of_the_tokens_kept(
    launched: list[Flight], tmp_path: Path, caplog: pytest.LogCaptureFixture, types: tuple[str, ...]
) -> None:
    """Of a pass without drafts that is known before it is read, of one with drafts it is not.

    The draft model has pages alone and could go ahead; it is a stranger, whose drafts are lost.
    """
    tiny_checkpoint("qwen3_5", tmp_path / "target", changes={"max_position_embeddings": 2048})
    tiny_checkpoint("qwen3", tmp_path / "draft", changes={"max_position_embeddings": 2048})
    lab = Lab(Folders(tmp_path / "target", tmp_path / "draft"), torch.float32)
    asked = [replace(one, speculate=Speculate(n_max=3)) for one in demo_cases(lab, "warm", 4)]
    meant = play(lab, Bench(snapshot_bytes=0), asked).tokens
    bench = Bench(types, n_slots=2, adaptive=False, overlaps=True)
    assert play(lab, bench, asked).tokens == meant
    assert all(flight.is_certain for flight in launched)
    assert launched or types
    assert not caplog.records  # a pass that fails is run again


@pytest.mark.parametrize("name", ["draft-model", "draft-mtp"])
@pytest.mark.parametrize("part", ["positions", "noise"])
def test_a_pass_that_begins_at_the_wrong_place_is_seen(
    lab: Lab, cases: Sequence[Case], monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    bench = Bench((name,), adaptive=False, overlaps=True)
    meant = play(lab, bench, cases).tokens
    if part == "positions":
        monkeypatch.setattr(Batch, "move_back", lambda *args: None)
    else:
        monkeypatch.setattr(Flight, "params", lambda *args: None)
    assert play(lab, bench, cases).tokens != meant
