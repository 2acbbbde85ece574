"""Drafting from the target's hidden states: pairing, feeding, gaps and prefixes, on a head that knows its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.api import Delta, Done
from engine.batch import Batch
from engine.cache.cache import Cache
from engine.cache.store import Store
from engine.speculate.draft_hidden import DraftHidden
from engine.speculate.drafter import Drafter
from tests.unit.toy import CPU, ToyNetwork, toy_engine, toy_slot

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@dataclass
class ToyHead:
    """Agrees with the toy target if, and only if, every row pairs the token at p + 1 with the state at p.

    The target's state at p is the token at p; the head's own after the token at p + 1 is that token. What the head has
    seen it reads back from its store: the token at p + 1 lies at position p, the first token beside position 0.
    """

    target: ToyNetwork
    taps: tuple[int, ...] = (0,)
    device: torch.device = CPU
    n_rows: int = 0
    n_logits: int = 0
    widths: list[int] = field(default_factory=list)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        (stream,) = taps
        return stream

    def logits(self, said: Tensor) -> Tensor:
        self.n_logits += len(said)
        return said.clone()

    def run(self, batch: Batch, hidden: Tensor, store: Store) -> tuple[Tensor, Tensor]:
        """What it says is its logits already."""
        self.n_rows += len(batch.token_ids)
        self.widths.append(len(batch.token_ids))
        cells, firsts = (
            store.layers[0].keys[:, 0, :, 0],
            store.layers[0].values[:, 0, :, 0],
        )  # [n_pages, page_size] each
        size = cells.shape[1]
        cells[batch.row_pages, batch.row_offsets] = batch.token_ids.float()
        logits = []
        for row in range(len(batch.token_ids)):
            span = int(torch.searchsorted(batch.span_starts, row, right=True)) - 1
            position = int(batch.positions[row])
            pages = batch.page_table[span].long()
            before = torch.arange(position)
            if position == 0:
                firsts[pages[0], 0] = hidden[row, 0]
            else:
                at = position - 1
                assert hidden[row, 0] == cells[pages[at // size], at % size], (
                    "the state is of another position"
                )
            if row in batch.logit_index.tolist():
                seen = cells[pages[before // size], before % size].numpy()
                tokens = np.concatenate(([firsts[pages[0], 0]], seen, [float(batch.token_ids[row])]))
                logits.append(self.target._logits(tokens.astype(np.int64)))
        out = torch.from_numpy(np.array(logits, dtype=np.float32).reshape(-1, self.target.vocab_size))
        return out, batch.token_ids[batch.logit_index].float()[:, None]


def engine_with(head: ToyHead, **options: int) -> tuple:
    def drafters(cache: Cache) -> list[Drafter]:
        cache._followers = frozenset({"draft"})
        return [DraftHidden("draft", head, cache)]

    return toy_engine(drafters, **options), head


def play(toy, name: str, prompt: list[int] = PROMPT, **options: object) -> tuple[list[int], Done]:
    toy.engine.add(name, lambda slot_id: toy_slot(slot_id, name, prompt, **options))  # type: ignore[arg-type]
    tokens: list[int] = []
    while True:
        for request, event in toy.engine.step():
            if request == name and isinstance(event, Delta):
                tokens += event.token_ids
            elif request == name:
                assert isinstance(event, Done)
                return tokens, event


@pytest.fixture
def plain() -> list[int]:
    return play(toy_engine(n_slots=1), "plain")[0]


def test_a_head_that_knows_the_text_is_always_right(plain: list[int]) -> None:
    toy, head = engine_with(ToyHead(ToyNetwork()), n_slots=1)
    tokens, done = play(toy, "a", types=("draft",), n_max=4)
    assert tokens == plain
    count = done.speculation.drafters["draft"]
    assert count.n_accepted == count.n_drafted > 10
    assert head.widths[:2] == [11, 1], "the prompt at once, then one row per guess but the last"


@pytest.mark.parametrize("agreement", [0.8, 0.3])
def test_what_was_guessed_wrong_is_computed_again_with_the_targets_states(
    agreement: float, plain: list[int]
) -> None:
    """The head asserts on every row that it is paired with the right state."""
    toy, _ = engine_with(ToyHead(ToyNetwork(agreement=agreement)), n_slots=1, batch_size=8)
    tokens, done = play(toy, "a", types=("draft",), n_max=4)
    assert tokens == plain
    assert done.speculation.n_drafted > done.speculation.n_accepted > 0


def test_slots_with_other_lengths_and_chunked_prompts_do_not_disturb_each_other() -> None:
    prompts = {"a": PROMPT, "b": [7, 7], "c": list(range(1, 30)), "d": [2, 3, 5]}
    expected = {name: play(toy_engine(n_slots=1), name, prompt)[0] for name, prompt in prompts.items()}
    toy, _ = engine_with(ToyHead(ToyNetwork(agreement=0.7)), n_slots=3, batch_size=10, n_pages=40)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for i, (name, prompt) in enumerate(prompts.items()):
        toy.engine.add(
            name,
            lambda slot_id, name=name, prompt=prompt, i=i: toy_slot(
                slot_id, name, prompt, types=("draft",), n_max=(4, 1, 3, 0)[i]
            ),
        )
    while toy.engine.busy:
        for name, event in toy.engine.step():
            if isinstance(event, Delta):
                tokens[name] += event.token_ids
    assert tokens == expected
    assert toy.engine.stats().drafters["draft"].n_drafted > 30, (
        "it never failed, or it would have been silenced"
    )


def test_a_prefix_made_with_drafting_off_serves_the_head_as_well(plain: list[int]) -> None:
    toy, head = engine_with(ToyHead(ToyNetwork()), n_slots=1)
    play(toy, "off", types=(), n_max=0)
    n_rows = head.n_rows
    assert n_rows >= len(PROMPT)
    assert head.n_logits == 0, "nobody asked what it would guess"
    tokens, done = play(toy, "on", types=("draft",), n_max=4)
    assert tokens == plain
    assert done.usage.n_cached == 8
    # The last shared row pairs with the next token of whoever made it; here that is the same.
    assert done.speculation.n_accepted == done.speculation.n_drafted > 0
    assert head.n_rows - n_rows < n_rows + 8


def test_a_prefix_without_the_heads_rows_is_computed_again(plain: list[int]) -> None:
    toy, _ = engine_with(ToyHead(ToyNetwork()), n_slots=1)
    accept = DraftHidden.accept
    DraftHidden.accept = lambda self, kept: None  # type: ignore[method-assign]
    try:
        play(toy, "broken", types=("draft",), n_max=4)
    finally:
        DraftHidden.accept = accept  # type: ignore[method-assign]
    tokens, done = play(toy, "sound", types=("draft",), n_max=4)
    assert tokens == plain
    assert done.usage.n_cached == 0
    assert done.speculation.n_accepted == done.speculation.n_drafted > 0


def test_after_a_gap_the_head_keeps_silent(plain: list[int]) -> None:
    head = ToyHead(ToyNetwork())
    toy, _ = engine_with(head, n_slots=1)
    toy.engine.add("a", lambda slot_id: toy_slot(slot_id, "a", PROMPT, types=("draft",), n_max=4))
    toy.engine.step()
    toy.cache.commit(0, "draft", 5)
    tokens, last = [], None
    n_drafted = toy.engine.stats().drafters["draft"].n_drafted
    while toy.engine.busy:
        for _, event in toy.engine.step():
            if isinstance(event, Delta):
                tokens += event.token_ids
            last = event
    assert isinstance(last, Done)
    assert tokens == plain[-len(tokens) :]
    assert toy.engine.stats().drafters["draft"].n_drafted <= n_drafted + 4


def test_a_guess_below_p_min_stops_its_slot_alone() -> None:
    toy, _ = engine_with(ToyHead(ToyNetwork()), n_slots=2)

    def sure(slot_id: int):
        slot = toy_slot(slot_id, "sure", PROMPT, types=("draft",), n_max=4)
        slot.speculate = replace(slot.speculate, p_min=0.999)
        return slot

    toy.engine.add("sure", sure)
    toy.engine.add("any", lambda slot_id: toy_slot(slot_id, "any", PROMPT, types=("draft",), n_max=4))
    ends = {}
    while toy.engine.busy:
        ends |= dict(toy.engine.step())
    assert ends["sure"].speculation.n_drafted < ends["any"].speculation.n_drafted
    assert ends["any"].speculation.histogram[4] > 0
