"""Drafting over the target's own keys and values, on a head that knows its text and checks every row it is given."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Delta, Done
from slipstream.engine.batch import Batch
from slipstream.engine.cache.store import Store
from slipstream.engine.speculate.network.draft_assistant import DraftAssistant
from tests.unit.toy import Toy, ToyNetwork, toy_engine, toy_slot

NAME = "draft-assistant"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@dataclass
class ToyAssistant:
    """Guesses the target's greedy text from the tokens in the target's cache.

    The target's state at p is the token at p. The state behind a guess is minus the number of a text of `texts`.
    """

    target: ToyNetwork
    taps: tuple[int, ...] = (0,)
    n_passes: int = 0
    texts: list[list[int]] = field(default_factory=lambda: [[]])

    def run(self, batch: Batch, states: Tensor, store: Store) -> tuple[Tensor, Tensor]:
        self.n_passes += 1
        cells = store.layers[0].keys[:, 0, :, 0]  # [n_pages, page_size]
        said, after = [], []
        for i, (state, token_id) in enumerate(
            zip(states[:, 0].tolist(), batch.token_ids.tolist(), strict=True)
        ):
            seen = torch.arange(int(batch.n_past[i]) + 1)
            assert batch.positions[i] == seen[-1]
            pages = batch.page_table[i].long()[seen // cells.shape[1]]
            before = cells[pages, seen % cells.shape[1]].int().tolist()
            if state >= 0:
                assert state == before[-1], "the state of the last token that the target has computed"
                guessed = []
            else:
                guessed = self.texts[int(-state)]
                assert guessed[: len(before)] == before, "all guesses look at the same context"
                guessed = guessed[len(before) :]
            text = [*before, *guessed, token_id]
            self.texts.append(text)
            said.append(self.target._logits(np.array(text, dtype=np.int64)))
            after.append(-float(len(self.texts) - 1))
        return torch.tensor(np.array(said, dtype=np.float32)), torch.tensor(after)[:, None]

    def logits(self, said: Tensor) -> Tensor:
        return said


def engine_with(head: ToyAssistant, **options: int) -> Toy:
    return toy_engine(lambda cache: [DraftAssistant(head, cache)], **options)


def play(toy: Toy, name: str, prompt: list[int] = PROMPT, **options: object) -> tuple[list[int], Done]:
    toy.engine.add(toy_slot(name, prompt, temperature=0.0, **options))  # type: ignore
    tokens: list[int] = []
    while True:
        for request, event in toy.engine.step():
            if request == name and isinstance(event, Delta):
                tokens += event.token_ids
            elif request == name:
                assert isinstance(event, Done)
                return tokens, event


@pytest.mark.parametrize("agreement", [1.0, 0.6])
def test_text_is_the_targets_and_a_head_that_knows_it_is_always_right(agreement: float) -> None:
    plain, _ = play(toy_engine(n_slots=1), "plain")
    head = ToyAssistant(ToyNetwork(agreement=agreement))
    tokens, done = play(engine_with(head, n_slots=1), "a", types=(NAME,), n_max=3)
    assert tokens == plain
    count = done.speculation.drafters[NAME]
    assert (
        count.n_accepted == count.n_drafted > 10 if agreement == 1 else 0 < count.n_accepted < count.n_drafted
    )


def test_slots_side_by_side_that_want_more_and_less() -> None:
    head = ToyAssistant(ToyNetwork())
    toy, done = engine_with(head, n_slots=3, batch_size=40), {}
    for i in range(6):
        prompt = [*PROMPT[: 1 + 2 * i], i]
        toy.engine.add(toy_slot(str(i), prompt, types=(NAME,), n_max=1 + i, temperature=0.0))
    while toy.engine.busy:
        done |= {name: event for name, event in toy.engine.step() if isinstance(event, Done)}
    counts = [done[str(i)].speculation for i in range(6)]
    assert all(one.n_accepted == one.n_drafted > 0 for one in counts)


def test_a_sequence_that_starts_over_is_guessed_on_once_its_last_state_is_known_again() -> None:
    head = ToyAssistant(ToyNetwork())
    toy = engine_with(head, n_slots=1)
    plain, _ = play(toy_engine(n_slots=1), "plain")
    toy.engine.add(toy_slot("a", PROMPT, types=(NAME,), n_max=3, temperature=0.0))
    tokens: list[int] = []
    for step in range(100):
        for _, event in toy.engine.step():
            if isinstance(event, Delta):
                tokens += event.token_ids
        if step == 3:
            toy.engine.seats._preempt(toy.engine.seats.running[0])
        if not toy.engine.busy:
            break
    assert tokens == plain
    count = toy.engine.stats().drafters[NAME]
    assert count.n_accepted == count.n_drafted > 0


def test_a_prefix_from_the_cache_is_guessed_on_from_its_first_pass() -> None:
    head = ToyAssistant(ToyNetwork())
    toy = engine_with(head, n_slots=1)
    meant, _ = play(toy, "off", types=(), n_max=0)
    assert head.n_passes == toy.target.n_tapped == 0, "a request that does not use it costs it nothing"
    tokens, done = play(toy, "on", types=(NAME,), n_max=3)
    assert tokens == meant
    assert done.usage.n_cached == 8
    assert done.speculation.n_accepted == done.speculation.n_drafted > 0


def test_behind_an_unread_pass_it_waits_for_the_host() -> None:
    plain, _ = play(toy_engine(n_slots=1), "plain")
    head = ToyAssistant(ToyNetwork())
    tokens, done = play(engine_with(head, n_slots=1, overlaps=True), "a", types=(NAME,), n_max=3)
    assert tokens == plain
    assert done.speculation.n_accepted == done.speculation.n_drafted > 0
