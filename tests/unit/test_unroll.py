"""Guesses are made without reading anything back: how often a draft waits for the device, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Sampling
from slipstream.engine.sample.params import resolve_sampling
from slipstream.engine.sample.pick import pick
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import Guess, Want
from slipstream.engine.speculate.network.unroll import Going, Rows, Unrolled
from slipstream.kernels import select
from tests.unit.toy import CPU, VOCAB, toy_slot

READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the tensor methods called meanwhile that make a program wait for its device."""
    found: list[str] = []

    def spy(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Tensor, *args: Any, **options: Any) -> Any:
            found.append(name)
            return original(self, *args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, spy(name, getattr(Tensor, name)))
        yield found


class Toy:
    """A network whose logits follow from the token before: row t of a random table."""

    def __init__(self, wants: list[Want], *, estimates: bool = False, broken: int = -1) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
        if broken >= 0:
            self.table[broken] = float("nan")
        self.wants, self.estimates = wants, estimates
        self.n_rows: list[int] = []
        self.fed: list[Tensor] = []

    def rows(self, token_ids: Tensor) -> Rows:
        logits = self.table.index_select(0, token_ids)  # [n_active, VOCAB]
        self.n_rows.append(len(token_ids))
        return logits, torch.sigmoid(logits[:, 0]) if self.estimates else None

    def step(self, going: Going) -> Rows:
        assert going.token_ids.shape == (len(going.wants),)
        self.fed.append(going.token_ids)
        return self.rows(going.token_ids)

    def draft(self) -> list[Guess]:
        last = torch.tensor([want.slot.tokens[-1] for want in self.wants])
        self.unrolled = Unrolled(self.wants)
        return self.unrolled.launch(range(len(self.wants)), self.rows(last), self.step).read()


@pytest.fixture(autouse=True)
def _selected() -> None:
    select(CPU, torch.float32)


def wants_of(*depths: int, p_min: float = 0.0, sampling: Sampling | None = None) -> list[Want]:
    wants = []
    for i, depth in enumerate(depths):
        slot = toy_slot(str(i), [3, 1, 4, i], slot_id=i, n_max=depth)
        slot.speculate = replace(slot.speculate, p_min=p_min)
        if sampling is not None:
            slot.sampling = resolve_sampling(sampling, {}, [], VOCAB)
        wants.append(Want(slot, depth))
    return wants


@pytest.mark.parametrize("estimates", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(seed=3), Sampling(seed=3, logit_bias={5: 4.0}), None])
def test_a_draft_is_read_once_however_long_it_is(
    estimates: bool, sampling: Sampling | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for depths in ((2, 2, 1), (16, 16, 9)):
        toy = Toy(wants_of(*depths, sampling=sampling), estimates=estimates)
        with reads(monkeypatch) as found:
            guesses = toy.draft()
        assert [len(one) for one in guesses] == list(depths)
        assert found == ["tolist", "tolist"], "the tokens and how sure they are"
    assert toy.n_rows == [3] * 9 + [2] * 7


@pytest.mark.parametrize("penalty", ["repeat_penalty", "presence_penalty", "frequency_penalty"])
def test_where_penalties_count_guesses_each_is_read(penalty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are what the target would pick if all before them were kept."""
    wants = wants_of(20, 12, sampling=Sampling(seed=3, **{penalty: 2.0}))
    toy = Toy(wants)
    with reads(monkeypatch) as found:
        guesses = toy.draft()
    assert found.count("tolist") == 2 * 20
    for want, guess in zip(wants, guesses, strict=True):
        tokens = list(want.slot.tokens)
        for token_id in guess.token_ids:
            assert token_id == picked_after(toy.table, want.slot, tokens)
            tokens.append(token_id)
    plain = Toy(wants_of(20, 12, sampling=Sampling(seed=3))).draft()
    assert [one.token_ids for one in guesses] != [one.token_ids for one in plain]


def picked_after(table: Tensor, slot: Slot, tokens: list[int]) -> int:
    """The token that the target would pick on the toy's logits, one row alone."""
    row = slot.row(tokens[len(slot.tokens) :])
    return int(pick(table[tokens[-1]].clone()[None], [row]).token_ids[0])


@pytest.mark.parametrize("estimates", [False, True])
def test_p_min_cuts_the_same_guesses_whether_looked_at_on_the_way_or_not(
    estimates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = (Toy(wants_of(12, 12, 12, 5, p_min=0.2), estimates=estimates) for _ in range(2))
    guesses = early.draft()
    assert len({len(one) for one in guesses}) > 1, "a slot stops alone"
    assert min(min(one.survival, default=1) for one in guesses) >= 0.2
    monkeypatch.setattr(Unrolled, "_looks", lambda self, able, device: False)
    assert late.draft() == guesses
    assert sum(early.n_rows) < sum(late.n_rows) == 12 + 12 + 12 + 5, "a look on the way saves passes"
    for short, long in zip(early.unrolled.picked, late.unrolled.picked, strict=True):
        assert long[: len(short)] == short


def test_a_row_of_nan_ends_its_slots_guess_alone() -> None:
    whole = Toy(wants_of(8, 8)).draft()
    broken = whole[1].token_ids[3]
    assert broken not in whole[0].token_ids[:-1]
    toy = Toy(wants_of(8, 8), broken=broken)
    first, second = toy.draft()
    assert first == whole[0]
    assert second.token_ids == whole[1].token_ids[:4]
    assert all(int(one.min()) >= 0 for one in toy.fed), "the network is not fed what is no token"
