"""Drafting a block in one pass from the target's hidden states, on a head that knows its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Delta, Done
from slipstream.engine.batch import Batch
from slipstream.engine.cache.store import Store
from slipstream.engine.speculate.network.draft_block import DraftBlock
from tests.unit.toy import VOCAB, Toy, ToyNetwork, toy_engine, toy_slot

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
MASK = VOCAB - 1


@dataclass
class ToyBlock:
    """Writes the target's greedy text into its rows' logits, from the context that was injected.

    The target's state at p is the token at p. With `from_anchor` the anchor's row predicts too.
    """

    target: ToyNetwork
    from_anchor: bool = False
    taps: tuple[int, ...] = (0,)
    block_size: int = 4
    mask_id: int = MASK
    n_passes: int = 0
    n_injected: int = 0
    sure: tuple[float, ...] | None = None

    @property
    def n_drafts(self) -> int:
        return self.block_size - (not self.from_anchor)

    def inject(self, batch: Batch, features: Sequence[Tensor], store: Store) -> None:
        self.n_injected += len(batch.token_ids)
        cells = store.layers[0].keys[:, 0, :, 0]  # [n_pages, page_size]
        cells[batch.row_pages, batch.row_offsets] = features[0][:, 0]

    def run(self, batch: Batch, store: Store) -> tuple[Tensor, Tensor]:
        self.n_passes += 1
        cells = store.layers[0].keys[:, 0, :, 0]
        size, rows = cells.shape[1], []
        for i, span in enumerate(batch.spans):
            assert list(span.token_ids[1:]) == [MASK] * (len(span.token_ids) - 1)
            before = torch.arange(int(batch.n_past[i]))
            pages = batch.page_table[i].long()
            text = [*cells[pages[before // size], before % size].tolist(), float(span.token_ids[0])]
            for _ in range(span.n_logits):
                logits = self.target._logits(np.array(text, dtype=np.int64))
                rows.append(logits)
                text.append(float(np.argmax(logits)))
        return torch.from_numpy(np.array(rows, dtype=np.float32)), torch.arange(len(rows))[:, None]

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        return (
            None
            if self.sure is None
            else torch.tensor([self.sure[int(row) % self.n_drafts] for row in hidden])
        )

    def correct(self, logits: Tensor, previous: Tensor) -> Tensor:
        return logits


def engine_with(head: ToyBlock, n_context: int = 64, **options: int) -> Toy:
    return toy_engine(lambda cache: [DraftBlock("draft", head, cache, n_context)], **options)


def play(toy: Toy, name: str, **options: object) -> tuple[list[int], Done]:
    toy.engine.add(toy_slot(name, PROMPT, temperature=0.0, **options))  # type: ignore
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


@pytest.mark.parametrize(("from_anchor", "longest"), [(False, 3), (True, 4)])
def test_a_block_that_knows_the_text_is_always_right(
    from_anchor: bool, longest: int, plain: list[int]
) -> None:
    head = ToyBlock(ToyNetwork(), from_anchor=from_anchor)
    tokens, done = play(engine_with(head, n_slots=1), "a", types=("draft",), n_max=16)
    assert tokens == plain
    count = done.speculation.drafters["draft"]
    assert count.n_accepted == count.n_drafted > 10
    assert len(count.accepted_by_position) == longest
    assert head.n_passes == done.speculation.n_steps - 1, (
        "one pass a round, none before the prompt's own token"
    )


def test_a_wrong_block_costs_nothing_but_its_pass(plain: list[int]) -> None:
    head = ToyBlock(ToyNetwork(agreement=0.6))
    tokens, done = play(engine_with(head, n_slots=1, batch_size=8), "a", types=("draft",), n_max=3)
    assert tokens == plain
    assert 0 < done.speculation.n_accepted < done.speculation.n_drafted


def test_a_draft_waits_for_no_copy_to_the_device(plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.tensor` on a GPU copies from memory that is not pinned, and waits for the block's pass to end."""

    def waits(*_: object, **__: object) -> Tensor:
        raise AssertionError("a copy that waits for the device")

    toy = engine_with(ToyBlock(ToyNetwork()), n_slots=1)
    monkeypatch.setattr(torch, "tensor", waits)
    tokens, done = play(toy, "a", types=("draft",), n_max=16)
    assert tokens == plain
    assert done.speculation.drafters["draft"].n_accepted > 10


def test_each_row_is_corrected_by_the_token_picked_before_it(plain: list[int]) -> None:
    head = ToyBlock(ToyNetwork())
    asked: list[int] = []

    def correct(logits: Tensor, previous: Tensor) -> Tensor:
        asked.append(int(previous[0]))
        return logits

    head.correct = correct  # type: ignore[method-assign]
    toy = engine_with(head, n_slots=1)
    toy.engine.add(toy_slot("a", PROMPT, types=("draft",), n_max=3, temperature=0.0))
    toy.engine.step()
    toy.engine.step()
    assert asked == plain[:3], "the anchor, then the guesses, which here are right"


def test_where_the_block_says_how_sure_it_is_that_counts_against_p_min() -> None:
    toy = engine_with(ToyBlock(ToyNetwork(), sure=(0.9, 0.4, 0.9)), n_slots=1)
    cautious = toy_slot("a", PROMPT, types=("draft",), n_max=3, temperature=0.0)
    cautious.speculate = replace(cautious.speculate, p_min=0.5)
    toy.engine.add(cautious)
    while toy.engine.busy:
        toy.engine.step()
    count = toy.engine.stats().drafters["draft"]
    assert count.n_drafted == count.n_drafts > 0, "one token a draft: the second is too unsure"


def test_a_request_that_does_not_use_the_block_costs_it_nothing(plain: list[int]) -> None:
    head = ToyBlock(ToyNetwork())
    toy = engine_with(head, n_slots=1)
    tokens, _ = play(toy, "off", types=(), n_max=0)
    assert tokens == plain
    assert head.n_injected == head.n_passes == toy.target.n_tapped == 0


def test_a_block_goes_on_from_where_a_prefix_ends() -> None:
    """A prefix made without it is adopted whole; from there on the block is right, as the text depends on little."""
    head = ToyBlock(ToyNetwork(memory=3))
    toy = engine_with(head, n_slots=1, memory=3)
    meant, _ = play(toy, "off", types=(), n_max=0)
    tokens, done = play(toy, "on", types=("draft",), n_max=3)
    assert tokens == meant
    assert done.usage.n_cached == 8
    assert done.speculation.n_accepted == done.speculation.n_drafted > 0


@pytest.mark.parametrize(("n_context", "n_fed"), [(3, 3), (4, 7), (8, 11)])
def test_a_prompt_is_fed_as_far_back_as_the_context(n_context: int, n_fed: int) -> None:
    """Eleven tokens in pages of four: the border that has the context behind it."""
    head = ToyBlock(ToyNetwork(memory=3))
    toy = engine_with(head, n_context, n_slots=1, memory=3)
    slot = toy_slot("a", PROMPT, types=("draft",), n_max=3, temperature=0.0)
    toy.engine.add(slot)
    toy.engine.step()
    (drafter,) = toy.engine._chain._on_device
    assert drafter.n_unfed(slot) == n_fed
    assert head.n_injected == 0
    toy.engine.step()
    assert head.n_injected == n_fed
    assert drafter.n_unfed(slot) == 4, "the last token and three drafts, which were right"
