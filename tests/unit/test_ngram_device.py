"""`ngram-device`: what it finds in texts on the device, behind unread passes too, and when it is asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream.engine.api import Delta
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.overlap import Overlap
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import UNREAD, Drafter, Guesses, Want
from slipstream.engine.speculate.ngram.ngram_device import NgramDevice
from slipstream.engine.speculate.tails import Tails
from slipstream.kernels import select
from tests.unit.doubles import read
from tests.unit.test_ngram_op import searched
from tests.unit.test_speculate import Says, chain_of, play_on, slot_with
from tests.unit.toy import CPU, Toy, toy_engine, toy_slot

TYPES = ("text", "ngram-device")
LOOP = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


@pytest.fixture(autouse=True)
def selected() -> None:
    select(CPU, torch.float32)


def drafter(n_slots: int = 4) -> NgramDevice:
    return NgramDevice(n_slots, 100, CPU)


def test_a_guess_is_what_followed_the_longest_earlier_run() -> None:
    made = read(drafter(), Want(slot_with(LOOP), 6))
    assert list(made.token_ids) == [7, 8, 5, 6, 7, 8]
    assert list(made.survival) == [0.8] * 6  # six tokens agree


def test_the_longer_the_run_the_surer_it_is() -> None:
    texts = ([1, 2, 3], [1, 2, 1], [9, 1, 2, 9, 1], [*range(1, 31), *range(1, 31)])
    sure = [read(drafter(), Want(slot_with(text), 1)).survival[0] for text in texts]
    assert sure == sorted(set(sure))


@pytest.mark.parametrize("seed", range(5))
def test_texts_that_grow_are_cut_and_change_are_read_as_they_are(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    alone, slots = drafter(), [slot_with([1], slot_id=i) for i in range(4)]
    for _ in range(40):
        slot = slots[below(4)]
        if below(5) == 0:
            slot.truncate(1 + below(len(slot.tokens)))
            alone.begin(slot)
        elif below(5) == 0:
            slot = slots[slot.id] = slot_with([below(3) for _ in slot.tokens], slot_id=slot.id)
            alone.begin(slot)
        slot.tokens += [below(3) for _ in range(below(4)) if len(slot.tokens) < 95]
        asked = [one for one in slots if below(2)] or [slot]
        wants = [Want(one, 1 + below(6)) for one in asked]
        guesses = alone.draft(wants)
        assert guesses is not None
        meant = [searched(want.slot.tokens, want.n_max)[0] for want in wants]
        assert guesses.token_ids.tolist() == [token_id for one in meant for token_id in one]
        assert [list(one.token_ids) for one in guesses.read()] == meant


def behind(slot: Slot, drafts: list[int], picks: list[int]) -> tuple[Want, list[int]]:
    """A want behind an unread pass with these drafts and picks, and the text that the pass writes."""
    kept = next(
        (i for i, (one, own) in enumerate(zip(drafts, picks, strict=False)) if one != own), len(drafts)
    )
    return Want(slot, 5, (*drafts, UNREAD)), [*slot.tokens, *drafts[:kept], picks[kept]]


@pytest.mark.parametrize("n_rounds", [1, 3])
def test_behind_an_unread_pass_it_guesses_what_it_would_guess_once_that_is_read(n_rounds: int) -> None:
    """Two slots, of which one loses drafts; afterwards the texts go on from what was kept."""
    alone = drafter()
    slots = [slot_with(LOOP, slot_id=2), slot_with([3, 4, 9, 3, 4, 9, 4], slot_id=0)]
    for _ in range(n_rounds):
        passes = [behind(slots[0], [7, 8, 5], [7, 8, 5, 6]), behind(slots[1], [9, 3], [9, 1, 4])]
        tails = Tails(
            {2: range(4), 0: range(4, 7)},
            torch.tensor([slots[0].tokens[-1], 7, 8, 5, slots[1].tokens[-1], 9, 3]),
            torch.tensor([7, 8, 5, 6, 9, 1, 4]),
        )
        guesses = alone.draft([want for want, _ in passes], tails)
        assert guesses is not None
        meant = [searched(text, 5)[0] for _, text in passes]
        assert guesses.token_ids.tolist() == [token_id for one in meant for token_id in one]
        for slot, (_, text) in zip(slots, passes, strict=True):
            slot.tokens[:] = text
        assert [list(one.token_ids) for one in guesses.read()] == meant


def test_one_slot_of_those_in_an_unread_pass() -> None:
    slot = slot_with(LOOP, slot_id=1)
    tails = Tails({3: range(1), 1: range(1, 2)}, torch.tensor([4, 6]), torch.tensor([4, 7]))
    guesses = drafter().draft([Want(slot, 3, (UNREAD,))], tails.of_slots([1]))
    assert guesses is not None
    assert guesses.token_ids.tolist() == [8, 5, 6]


class Counting(NgramDevice):
    """Counts what it is asked for, read first and behind unread passes."""

    def __init__(self) -> None:
        super().__init__(1, 4000, CPU)
        self.asked: list[int] = []
        self.asked_behind: list[int] = []

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        (self.asked if tails is None else self.asked_behind).extend(want.n_max for want in wants)
        return super().draft(wants, tails)


def one_slot_behind(slot: Slot, picked: int) -> tuple[list[Want], Tails]:
    """A want behind an unread pass without drafts, which picks this token."""
    last = torch.tensor([slot.tokens[-1]])
    return [Want(slot, 8, (UNREAD,))], Tails({slot.id: range(1)}, last, torch.tensor([picked]))


def gaining(chain: Chain, slot: Slot, n_accepted: int) -> None:
    """Passes that were read first have brought text drafters so many tokens each."""
    for _ in range(60):
        chain.lengths.overlap.ask([slot.id])
        chain.lengths.overlap.gain(slot.id, n_accepted)


def learnt(chain: Chain, slot: Slot, n: int) -> None:
    """The text goes on for so many tokens, and all that was guessed is judged by it."""
    chain.begin(slot)
    for _ in range(n):
        chain.draft([Want(slot, 8)], Pass(1, 1))
        play_on(chain, slot, LOOP[len(slot.tokens) % 4])


def test_where_text_drafters_are_asked_it_is_only_tried() -> None:
    counting = Counting()
    chain = chain_of(Says("text", []), counting, slope=0.01)
    chain.lengths.costs.draft_s = lambda *given: 0.05  # type: ignore[method-assign]
    learnt(chain, slot_with(LOOP[:8], types=TYPES), 300)
    assert 0 < len(counting.asked) < 100
    assert {*counting.asked} == {2}
    alone = Counting()
    learnt(chain_of(alone, slope=0.01), slot_with(LOOP[:8], types=("ngram-device",)), 30)
    assert len(alone.asked) > 20
    assert max(alone.asked) == 8


def test_lengths_that_do_not_adapt_leave_what_is_read_to_text_drafters() -> None:
    counting = Counting()
    learnt(chain_of(Says("text", []), counting), slot_with(LOOP[:8], types=TYPES), 20)
    assert not counting.asked


@pytest.mark.parametrize(("n_gained", "reads"), [(2, False), (60, True)])
def test_a_pass_is_not_read_for_what_is_found_on_the_device_too(n_gained: int, reads: bool) -> None:
    counting, slot = Counting(), slot_with(LOOP[:8], types=TYPES)
    chain = chain_of(Says("text", []), counting, slope=0.01)
    learnt(chain, slot, 200)
    gaining(chain, slot, n_gained)
    wants, tails = one_slot_behind(slot, LOOP[len(slot.tokens) % 4])
    drafts = chain.draft(wants, Pass(1, 1), tails)
    assert (drafts is None) == reads
    if drafts is not None:
        assert len(drafts.by_slot[0]) == 8
        assert drafts.read is not None
        assert drafts.read()[0].token_ids == tuple(LOOP[(len(slot.tokens) + 1 + i) % 4] for i in range(8))


@pytest.mark.parametrize(("n_offered", "reads"), [(1, False), (8, True)])
def test_what_text_drafters_have_already_is_weighed_against_it(n_offered: int, reads: bool) -> None:
    counting, slot = Counting(), slot_with([*range(20)], types=TYPES)
    text = Says("text", [1] * n_offered, [0.99] * n_offered)
    chain = chain_of(text, counting, slope=0.01)
    gaining(chain, slot, 0)
    wants, tails = one_slot_behind(slot, 1)
    assert chain._asking.promise(counting, wants) > 1
    assert (chain.draft(wants, Pass(1, 1), tails) is None) == reads


def test_one_that_is_always_wrong_is_left_out_and_no_network_is_blamed() -> None:
    counting, slot = Counting(), slot_with([*range(20)], types=("ngram-device",))
    chain = chain_of(counting, slope=0.05)
    chain.lengths.costs.draft_s = lambda *given: 0.05  # type: ignore[method-assign]
    chain.begin(slot)
    for i in range(600):
        wants = [Want(slot, 8)]
        drafts = chain.draft(wants, Pass(1, 1))
        assert drafts is not None
        for draft in drafts.by_slot.values():
            chain.credit(slot, draft, 0, Pass(1, 1))
        play_on(chain, slot, 20 + i)
    told = chain.account.report([slot])
    assert told.why_not == "not_worth_asking"
    assert told.drafters["ngram-device"].treatment == "tried"
    assert told.drafters["ngram-device"].guess_s == chain.lengths.costs.call_s("ngram-device")[0], "of a call"
    assert chain.guard.doubtful == ()


def test_what_is_not_asked_for_promises_nothing() -> None:
    counting = Counting()
    chain = chain_of(Says("text", []), counting)
    learnt(chain, slot_with(LOOP[:8], types=("ngram-device",)), 20)
    want = Want(slot_with(LOOP, types=("text",)), 8, (UNREAD,))
    assert chain._asking.promise(counting, [want]) == 0
    drafts = chain.draft([want], Pass(1, 1), Tails({0: range(1)}, torch.tensor([6]), torch.tensor([7])))
    assert drafts is None or not drafts.by_slot.get(0)


def test_gains_by_reading_count_as_far_as_they_are_more() -> None:
    overlap = Overlap(adaptive=True)
    for _ in range(40):
        overlap.waited(0.002)
        overlap.ask([0])
        overlap.gain(0, 3)
    assert overlap.reads_first([0], 0.01, 2.5)
    assert not overlap.reads_first([0], 0.01, 2.9)
    assert not overlap.reads_first([0], 0.01, 4.0)


def play_loops(toy: Toy, types: tuple[str, ...]) -> tuple[dict[str, list[int]], int]:
    """Three greedy requests to their ends: their tokens, and how many passes were launched ahead."""
    tokens: dict[str, list[int]] = {name: [] for name in "abc"}
    n_ahead = 0
    for i, name in enumerate(tokens):
        toy.engine.add(toy_slot(name, [i, i + 1], types=types, max_tokens=60, temperature=0.0))
    while toy.engine.busy:
        for name, event in toy.engine.step():
            if isinstance(event, Delta):
                tokens[name] += event.token_ids
        n_ahead += toy.engine._flight is not None
    return tokens, n_ahead


@pytest.mark.parametrize("n_slots", [1, 3])
def test_loops_are_drafted_without_a_look_at_the_host(n_slots: int) -> None:
    """A target that sees one token writes loops. Nearly all passes are launched behind unread passes."""
    texts, counts = [], []
    for makes, types in (((), ()), ((NgramDevice(n_slots, 256, CPU),), ("ngram-device",))):
        made: list[Drafter] = [*makes]
        toy = toy_engine(
            lambda cache, made=made: made, n_slots=n_slots, overlaps=True, memory=1, batch_size=32
        )
        tokens, n_ahead = play_loops(toy, types)
        texts.append(tokens)
        counts.append((toy.target.n_passes, n_ahead))
    assert texts[0] == texts[1]
    (n_plain, _), (n_drafted, n_ahead) = counts
    assert n_drafted < 0.6 * n_plain
    assert n_ahead > 0.8 * n_drafted
