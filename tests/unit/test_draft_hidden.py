"""Drafting from the target's hidden states: pairing, feeding, gaps and prefixes, on a head that knows its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Delta, Done
from slipstream.engine.batch import Batch
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.kv import KV
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.speculate.drafter import Drafter, Kept
from slipstream.engine.speculate.network.draft_hidden import DraftHidden
from slipstream.engine.speculate.network.unroll import Unrolled
from tests.unit.toy import CPU, ToyNetwork, toy_engine, toy_slot

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@dataclass
class ToyHead:
    """Agrees with the toy target if, and only if, every row pairs the token at p + 1 + k with module k's state at p.

    The target's state at p is the token at p; a module's own after a token is that token. What the head has seen it
    reads back from its store: module k's token lies at position p, the first one that it saw beside its first row.
    """

    target: ToyNetwork
    n_modules: int = 1
    taps: tuple[int, ...] = (0,)
    is_chained: bool = True
    device: torch.device = CPU
    n_rows: int = 0
    n_logits: int = 0
    widths: list[int] = field(default_factory=list)

    @property
    def modules(self) -> list[ToyModule]:
        return [ToyModule(self, k) for k in range(self.n_modules)]

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        (stream,) = taps
        return stream


@dataclass
class ToyModule:
    """Module k of the head."""

    head: ToyHead
    k: int

    def logits(self, said: Tensor) -> Tensor:
        self.head.n_logits += len(said)
        return said.clone()

    def run(self, batch: Batch, hidden: Tensor, store: Store) -> tuple[Tensor, Tensor]:
        """What it says is its logits already."""
        head = self.head
        head.n_rows += len(batch.token_ids)
        head.widths.append(len(batch.token_ids))
        cells, firsts = (
            store.layers[self.k].keys[:, 0, :, 0],
            store.layers[0].values[:, 0, :, 0],
        )  # [n_pages, page_size] each
        earliest = store.layers[0].keys[:, 0, :, 0]  # [n_pages, page_size]
        size = cells.shape[1]
        cells[batch.row_pages, batch.row_offsets] = batch.token_ids.float()
        logits = []
        for row in range(len(batch.token_ids)):
            span = int(torch.searchsorted(batch.span_starts, row, right=True)) - 1
            place = int(batch.n_past[span]) + row - int(batch.span_starts[span])
            assert int(batch.row_pages[row]) == int(batch.page_table[span, place // size])
            pages = batch.page_table[span].long()
            before, missing = torch.arange(place), torch.arange(self.k)
            if place > 0:
                at = place - 1
                assert hidden[row, 0] == cells[pages[at // size], at % size], (
                    "the state is of another position"
                )
            elif self.k == 0:
                firsts[pages[0], 0] = hidden[row, 0]
            if row in batch.logit_index.tolist():
                parts = [
                    firsts[pages[0], :1],
                    earliest[pages[missing // size], missing % size],
                    cells[pages[before // size], before % size],
                    batch.token_ids[row : row + 1],
                ]
                logits.append(head.target._logits(torch.cat(parts).numpy().astype(np.int64)))
        out = torch.from_numpy(np.array(logits, dtype=np.float32).reshape(-1, head.target.vocab_size))
        return out, batch.token_ids[batch.logit_index].float()[:, None]


def engine_with(head: ToyHead, n_context: int = 64, **options: int) -> tuple:
    def drafters(cache: Cache) -> list[Drafter]:
        layers = [KV(1, 1)] * head.n_modules
        cache.stores["draft"] = Store(
            layers, Sizes(n_slots=4, n_pages=len(cache.pool.pages), page_size=4), torch.float32, CPU
        )
        return [DraftHidden("draft", head, cache, n_context)]

    return toy_engine(drafters, **options), head


def play(toy, name: str, prompt: list[int] = PROMPT, **options: object) -> tuple[list[int], Done]:
    toy.engine.add(toy_slot(name, prompt, **options))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("n_modules", [2, 3, 5])
@pytest.mark.parametrize("n_max", [1, 4])
def test_modules_that_know_the_text_are_always_right(n_modules: int, n_max: int, plain: list[int]) -> None:
    """Each guess is its own module's, and the last module's from there on."""
    toy, head = engine_with(ToyHead(ToyNetwork(), n_modules), n_slots=1)
    tokens, done = play(toy, "a", types=("draft",), n_max=n_max)
    assert tokens == plain
    count = done.speculation.drafters["draft"]
    assert count.n_accepted == count.n_drafted > 8
    assert head.widths[:n_modules] == [11 - k for k in range(n_modules)], "each module lacks one token more"
    climbs = range(1, min(n_max, n_modules))
    goes_on = [1] * (n_max - 1 - len(climbs))
    assert head.widths[n_modules : n_modules + n_max - 1] == [*climbs, *goes_on]


@pytest.mark.parametrize("n_modules", [1, 2, 4])
@pytest.mark.parametrize("agreement", [0.8, 0.3])
def test_what_was_guessed_wrong_is_computed_again_with_the_targets_states(
    agreement: float, n_modules: int, plain: list[int]
) -> None:
    """The head asserts on every row that it is paired with the right state."""
    toy, _ = engine_with(ToyHead(ToyNetwork(agreement=agreement), n_modules), n_slots=1, batch_size=8)
    tokens, done = play(toy, "a", types=("draft",), n_max=4)
    assert tokens == plain
    assert done.speculation.n_drafted > done.speculation.n_accepted > 0


@pytest.mark.parametrize("n_modules", [1, 3])
@pytest.mark.parametrize("n_pages", [40, 18])
def test_slots_with_other_lengths_and_chunked_prompts_do_not_disturb_each_other(
    n_modules: int, n_pages: int
) -> None:
    """With few pages slots are preempted and start over from prefixes."""
    prompts = {"a": PROMPT, "b": [7, 7, 1, 2], "c": list(range(1, 30)), "d": [2, 3, 5, 1]}
    expected = {name: play(toy_engine(n_slots=1), name, prompt)[0] for name, prompt in prompts.items()}
    toy, _ = engine_with(
        ToyHead(ToyNetwork(agreement=0.7), n_modules), n_slots=3, batch_size=10, n_pages=n_pages
    )
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for i, (name, prompt) in enumerate(prompts.items()):
        toy.engine.add(toy_slot(name, prompt, types=("draft",), n_max=(4, 1, 3, 0)[i]))
    while toy.engine.busy:
        for name, event in toy.engine.step():
            if isinstance(event, Delta):
                tokens[name] += event.token_ids
    assert tokens == expected
    assert (toy.engine.stats().n_preempted > 0) == (n_pages == 18)
    assert toy.engine.stats().disabled_drafters == ()
    assert toy.engine.stats().drafters["draft"].n_drafted > 30, (
        "it never failed, or it would have been silenced"
    )


MEMORY = 5  # tokens before a row on which a text depends, for heads that have not seen it all


def forgetful(n_modules: int = 1, n_context: int = 64) -> tuple:
    """An engine and a head that is right wherever it has seen the last tokens."""
    return engine_with(ToyHead(ToyNetwork(memory=MEMORY), n_modules), n_context, n_slots=1, memory=MEMORY)


def drafter_of(toy) -> DraftHidden:
    (drafter,) = toy.engine._chain._on_device
    assert isinstance(drafter, DraftHidden)
    return drafter


def ask_seldom(toy, every: int) -> None:
    """From now on the head is asked at every so many steps only."""
    drafter, turns = drafter_of(toy), count()
    draft = drafter.draft
    drafter.draft = lambda wants, tails=None: (  # type: ignore[method-assign]
        Unrolled(wants) if next(turns) % every else draft(wants, tails)
    )


def test_a_request_that_does_not_use_the_head_costs_nothing() -> None:
    toy, head = engine_with(ToyHead(ToyNetwork()), n_slots=1)
    play(toy, "off", types=(), n_max=0)
    assert head.n_rows == 0
    assert toy.target.n_tapped == 0
    assert drafter_of(toy)._backlog._states == []


@pytest.mark.parametrize("n_modules", [1, 3])
def test_a_head_that_is_not_asked_runs_nothing_and_is_then_fed_at_once(
    n_modules: int, plain: list[int]
) -> None:
    """What it guesses is right only if all that it was not asked for is fed, in order."""
    toy, head = engine_with(ToyHead(ToyNetwork(), n_modules), n_slots=1)
    ask_seldom(toy, 4)
    slot = toy_slot("a", PROMPT, types=("draft",), n_max=4)
    toy.engine.add(slot)
    widths, tokens = [], []
    while toy.engine.busy:
        n, n_unfed = len(head.widths), drafter_of(toy).n_unfed(slot)
        for _, event in toy.engine.step():
            tokens += event.token_ids if isinstance(event, Delta) else ()
        widths.append((n_unfed, head.widths[n:][:1]))
    assert tokens == plain
    count = toy.engine.stats().drafters["draft"]
    assert count.n_accepted == count.n_drafted > 4
    assert widths[0] == (0, []), "the prompt is not fed with its own pass"
    assert widths[1] == (11, [11])
    runs = [(n_unfed, ran) for n_unfed, ran in widths[2:] if ran]
    assert 1 <= len(runs) <= len(widths) / 3
    assert all(ran == [n_unfed] for n_unfed, ran in runs)


@pytest.mark.parametrize("n_modules", [1, 2, 4])
def test_a_prefix_is_adopted_as_far_as_without_a_head(n_modules: int) -> None:
    """A prompt of four pages and a half, made without the head, then with it, which starts where the prefix ends."""
    prompt = [*PROMPT, *PROMPT[:7]]
    without = toy_engine(n_slots=1, memory=MEMORY)
    n_cached = [play(without, f"{i}", prompt)[1].usage.n_cached for i in range(2)]
    toy, _ = forgetful(n_modules)
    meant, done = play(toy, "off", prompt, types=(), n_max=0)
    assert done.usage.n_cached == n_cached[0]
    tokens, done = play(toy, "on", prompt, types=("draft",), n_max=4)
    assert tokens == meant
    assert done.usage.n_cached == n_cached[1] == 16
    assert done.speculation.n_accepted > done.speculation.n_drafted / 2, "right once it has seen enough"
    tokens, done = play(toy, "again", prompt, types=("draft",), n_max=4)
    assert tokens == meant
    assert done.usage.n_cached == 16


def test_rows_start_on_a_page_border_with_the_context_behind_it() -> None:
    """Of a prompt of 26 tokens and one more, with a context of 10, the last 14 are fed: the page has four."""
    toy, head = forgetful(n_context=10)
    slot = toy_slot("a", list(range(1, 27)), types=("draft",), n_max=4)
    toy.engine.add(slot)
    while slot.n_past < len(slot.tokens) - 1:
        toy.engine.step()
    assert slot.n_past == 26
    assert head.n_rows == 0
    assert drafter_of(toy).n_unfed(slot) == 10
    toy.engine.step()
    assert head.widths[0] == 10
    assert toy.cache.start(0, "draft") == 16
    while toy.engine.busy:
        toy.engine.step()
    count = toy.engine.stats().drafters["draft"]
    assert count.n_accepted == count.n_drafted > 8


def test_only_the_last_states_of_a_slot_are_kept() -> None:
    toy, _ = forgetful(n_context=6)
    ask_seldom(toy, 1000)
    slot = toy_slot("a", list(range(1, 41)), types=("draft",), n_max=4)
    toy.engine.add(slot)
    toy.engine.step()
    while toy.engine.busy:
        assert drafter_of(toy).n_unfed(slot) <= 6 + 3
        toy.engine.step()
    (states,) = drafter_of(toy)._backlog._states
    assert len(states) == 4 * (6 + 3), "slots of the store, and what each keeps"


@pytest.mark.parametrize("n_modules", [1, 3])
def test_after_a_gap_the_head_goes_on_from_the_next_page_border(n_modules: int) -> None:
    meant = play(toy_engine(n_slots=1, memory=MEMORY), "plain")[0]
    toy, _ = forgetful(n_modules)
    drafter, turns = drafter_of(toy), count()
    accept, n_lost_at = drafter.accept, 0

    def third_is_lost(kept: Sequence[Kept]) -> None:
        nonlocal n_lost_at
        if next(turns) == 2:
            n_lost_at = kept[0].slot.n_past
        else:
            accept(kept)

    drafter.accept = third_is_lost  # type: ignore[method-assign]
    toy.engine.add(toy_slot("a", PROMPT, types=("draft",), n_max=4))
    tokens, starts = [], []
    while toy.engine.busy:
        for _, event in toy.engine.step():
            tokens += event.token_ids if isinstance(event, Delta) else ()
        if toy.engine.busy:
            starts.append(toy.cache.start(0, "draft"))
    assert tokens == meant
    assert set(starts) == {0, -(-n_lost_at // 4) * 4}, "it starts over once"
    assert toy.engine.stats().drafters["draft"].n_accepted > 8
    assert toy.engine.stats().disabled_drafters == ()


def test_a_guess_below_p_min_stops_its_slot_alone() -> None:
    toy, _ = engine_with(ToyHead(ToyNetwork()), n_slots=2)

    sure = toy_slot("sure", PROMPT, types=("draft",), n_max=4)
    sure.speculate = replace(sure.speculate, p_min=0.999)
    toy.engine.add(sure)
    toy.engine.add(toy_slot("any", PROMPT, types=("draft",), n_max=4))
    ends = {}
    while toy.engine.busy:
        ends |= dict(toy.engine.step())
    assert ends["sure"].speculation.n_drafted < ends["any"].speculation.n_drafted
    assert ends["any"].speculation.histogram[4] > 0
