"""Trials that do not pay take a small share of the time, those that do are never held up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.cost import WIDTHS
from slipstream.engine.speculate.decide.trials import Allowance
from slipstream.engine.speculate.decide.value import Lengths, Pass
from slipstream.engine.speculate.drafter import Drafter, Guess, Kept, TextDrafter, Want
from slipstream.engine.speculate.text.suffix import Suffix
from tests.unit.doubles import AsNetwork, drafts_of
from tests.unit.test_speculate import chain_of
from tests.unit.toy import toy_slot

SHARE = 0.005
TEXT = 9000
PASS_S = 0.7e-3
SLOPE = 0.02


def slot_with(n_tokens: int, *types: str) -> Slot:
    return toy_slot("r", [1] * n_tokens, types=types)


def vain(allowance: Allowance, slot: Slot, price_s: float, n_tokens: int) -> list[int]:
    """At which tokens a drafter that earns nothing is asked, of so many at a second each."""
    asked = []
    for _ in range(n_tokens):
        if allowance.pays(slot, slot.speculate.types[0], price_s, 1.0):
            asked.append(slot.n_decoded)
        slot.append(1)
    return asked


def exhausted(allowance: Allowance, slot: Slot, price_s: float) -> int:
    """How often the slot's first drafter is asked at one place of a text, at a token a second."""
    n = 0
    while allowance.pays(slot, slot.speculate.types[0], price_s, 1.0):
        n += 1
    return n


@pytest.mark.parametrize("n_types", [1, 4])
@pytest.mark.parametrize("price_s", [0.004, 0.1, 0.7, 5.0])
def test_vain_trials_take_the_share_and_come_regularly(price_s: float, n_types: int) -> None:
    slot = slot_with(3, *"abcd"[:n_types])
    asked = vain(Allowance(adaptive=True), slot, price_s, TEXT)
    given = 1.0 / n_types  # at first
    most = given + SHARE * TEXT / n_types
    assert most - price_s - 1.0 < price_s * len(asked) <= most or len(asked) == TEXT
    gaps = [b - a for a, b in pairwise(asked)]
    assert max(gaps) <= price_s * n_types / SHARE + 1


def test_what_costs_less_than_the_share_is_always_asked() -> None:
    assert len(vain(Allowance(adaptive=True), slot_with(3, "a"), 0.0049, 4000)) == 4000
    assert len(vain(Allowance(adaptive=True), slot_with(3, "a"), 0.02, 4000)) < 1100


def test_costs_that_count_as_nothing_hold_nobody_up() -> None:
    assert len(vain(Allowance(adaptive=False), slot_with(3, "a"), 50.0, 100)) == 100


def test_what_is_earned_pays_for_trials_and_is_not_hoarded() -> None:
    allowance, slot = Allowance(adaptive=True), slot_with(3, "a")
    assert exhausted(allowance, slot, 0.1) == 10
    allowance.credit(slot, "a", 0.35, 1.0)
    assert [allowance.pays(slot, "a", 0.1, 1.0) for _ in range(5)] == [True] * 3 + [False] * 2
    for _ in range(100):
        allowance.credit(slot, "a", 4.0, 1.0)
    assert len(vain(allowance, slot, 0.1, 50)) <= 43, "four tokens' time, and the share of fifty"


def test_drafts_that_cost_more_rows_than_they_brought_leave_no_debt() -> None:
    allowance, slot = Allowance(adaptive=True), slot_with(3, "a")
    for _ in range(100):
        allowance.credit(slot, "a", -5.0, 1.0)
    first, *_ = vain(allowance, slot, 0.1, 100)
    assert first <= 20


def test_savings_are_a_slots_and_a_drafters_own_and_end_with_the_text() -> None:
    allowance, slot = Allowance(adaptive=True), slot_with(3, "a", "b")
    other = toy_slot("s", [1, 1, 1], slot_id=1, types=("a", "b"))
    assert exhausted(allowance, slot, 0.3) == 1, "half of a token's time"
    assert allowance.pays(slot, "b", 0.3, 1.0)
    assert allowance.pays(other, "a", 0.3, 1.0)
    allowance.begin(other.id)
    assert not allowance.pays(slot, "a", 0.3, 1.0)
    allowance.begin(slot.id)
    assert allowance.pays(slot, "a", 0.3, 1.0)


def test_requests_too_short_to_pay_for_a_trial_pay_for_it_together() -> None:
    """Of 32 tokens at a second each, to each of which a second is given at first that is its own."""
    allowance, asked = Allowance(adaptive=True), []
    for i in range(400):
        slot = slot_with(3, "a", "b")
        allowance.begin(slot.id)
        for _ in range(32):
            if allowance.pays(slot, "a", 3.0, 1.0):
                asked.append(i)
            slot.append(1)
        allowance.end(slot)
    given = SHARE / 2 * 32  # to a drafter, by each request
    assert 3 <= len(asked) <= 400 * given / (3.0 - 0.5)
    assert max(b - a for a, b in pairwise([0, *asked])) < 3.0 / (0.4 * given)


def test_requests_begin_with_less_where_trials_have_not_paid_for_long() -> None:
    """And with all that they may once they do."""
    allowance = Allowance(adaptive=True)

    def tried(n_requests: int, *, earning: int = 0) -> int:
        """Trials at the beginning of the last of so many requests, of which every so many earn something."""
        n = 0
        for i in range(n_requests):
            slot = slot_with(3, "a")
            allowance.begin(slot.id)
            n = exhausted(allowance, slot, 0.1)
            if earning and i % earning == 0:
                allowance.credit(slot, "a", 1.0, 1.0)
            allowance.end(slot)
        return n

    assert tried(10) == 10, "a token's time"
    assert tried(60) <= 1
    assert tried(40, earning=1) >= 10
    for _ in range(100):
        untried = slot_with(3, "a")
        allowance.credit(untried, "a", 0.0, 1.0)
        allowance.end(untried)
    assert tried(1) >= 10, "requests without trials say nothing"


def test_what_is_left_is_no_more_than_two_trials_and_a_drafters_own() -> None:
    allowance = Allowance(adaptive=True)
    assert not allowance.pays(slot_with(3, "a", "b"), "a", 9.0, 1.0)
    for i in range(1000):
        slot = toy_slot("r", [1, 1, 1], slot_id=i % 3, types=("a", "b"))
        allowance.begin(slot.id)
        allowance.credit(slot, "a", 0.0, 1.0)
        slot.tokens += [1] * 500
        allowance.end(slot)
    assert exhausted(allowance, slot_with(3, "b", "a"), 3.0) == 0
    assert exhausted(allowance, slot_with(3, "a", "b"), 3.0) == 6


def test_slots_on_trial_together_pay_for_one_call_and_each_for_what_it_is_fed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token takes a third of a second, which each slot is given at first; a call for two tokens 0.3 s."""
    network = AsNetwork(Timed(Clock(), "net", 0.0, lambda want: ()))
    chain = chain_of(network, slope=0.0)
    chain.lengths.costs.call_s = lambda *given: (0.28, 0.01, 0.001)  # type: ignore[method-assign]
    monkeypatch.setattr(chain._survival, "expected", lambda name, slots, n: np.zeros((len(slots), n)))
    monkeypatch.setattr(network, "n_unfed", lambda slot: (0, 300, 350, 300)[slot.id])
    slots = [toy_slot(f"r{i}", [1, 2], slot_id=i, types=("net",), n_max=8) for i in range(3)]
    asked = chain._asking.asked(network, [Want(slot, 8) for slot in slots], {}, Pass(3, 3))
    assert {want.slot.id: want.n_max for want in asked} == {0: 2, 1: 2}
    again = [Want(toy_slot("r3", [1, 2], slot_id=3, types=("net",), n_max=8), 8)]
    assert not chain._asking.asked(network, again, {}, Pass(3, 3)), "0.6 s, were it alone"


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0


class Timed(TextDrafter):
    """Guesses what `say` says, at a set price per slot; one that stands for a network, per position."""

    is_network = False

    def __init__(self, clock: Clock, name: str, seconds: float, say: Callable[[Want], Sequence[int]]) -> None:
        self.name, self.clock, self.seconds, self.say = name, clock, seconds, say
        self.n_asked = 0

    def guess(self, want: Want) -> Guess:
        return Guess(self.say(want))

    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        self.n_asked += len(wants)
        self.clock.now += self.seconds * (
            max(want.n_max for want in wants) if self.is_network else len(wants)
        )
        return super().draft(wants)


def played(clock: Clock, drafters: Sequence[Drafter], texts: Sequence[Sequence[int]], n_prompt: int) -> float:
    """Seconds of writing the texts, one a slot, where a further row costs 2 % of a pass; plain decoding's are 1."""
    lengths = Lengths(adaptive=True)
    for n_rows in WIDTHS:
        lengths.costs.passed(n_rows, PASS_S * (1 + SLOPE * (n_rows - 1)))
    chain, types = Chain(drafters, lengths, now=lambda: clock.now), tuple(one.name for one in drafters)
    slots = [
        toy_slot(f"r{i}", list(text[:n_prompt]), slot_id=i, types=types, n_max=8, max_tokens=len(text))
        for i, text in enumerate(texts)
    ]
    n_steps, before = len(texts[0]) - n_prompt, clock.now
    for slot in slots:
        chain.begin(slot)
    while running := [slot for slot in slots if len(slot.tokens) < len(texts[slot.id])]:
        wants = [Want(slot, 8) for slot in running]
        coming = Pass(len(running), len(running))
        drafts = drafts_of(chain, wants, coming)
        clock.now += PASS_S * (1 + SLOPE * (len(running) + sum(map(len, drafts)) - 1))
        kept = []
        for slot, draft in zip(running, drafts, strict=True):
            rest = texts[slot.id][len(slot.tokens) :]
            pairs = zip([*draft.token_ids, -1], rest, strict=False)
            n = next((i for i, (a, b) in enumerate(pairs) if a != b), len(rest) - 1)
            for token_id in rest[: n + 1]:
                slot.append(token_id)
            chain.credit(slot, draft, n, coming)
            kept.append(Kept(slot, draft, n))
        chain.accept(kept)
    return (clock.now - before) / (n_steps * PASS_S * (1 + SLOPE * (len(slots) - 1)))


def knows_from(n: int, text: Sequence[int], want: Want) -> Sequence[int]:
    """Wrong at first; from the n-th token on what the text goes on with."""
    at = len(want.slot.tokens)
    return text[at : at + want.n_max] if at >= n else [5000] * want.n_max


def random_text(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 4096, n).tolist()  # type: ignore[no-any-return]


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("n_slots", [1, 8])
@pytest.mark.parametrize("says", [0, 3])
@pytest.mark.parametrize("seconds", [30e-6, 300e-6])
def test_drafters_that_are_never_right_take_next_to_no_time(n_slots: int, says: int, seconds: float) -> None:
    clock = Clock()
    drafters = [Timed(clock, f"d{i}", seconds, lambda want: [5000] * says) for i in range(6)]
    network = Timed(clock, "network", seconds, lambda want: [5000] * want.n_max)
    network.is_network = True
    texts = [random_text(820, i) for i in range(n_slots)]
    assert played(clock, [*drafters, AsNetwork(network)], texts, 20) < 1.035
    assert all(one.n_asked >= 3 for one in drafters)


def test_a_drafter_whose_accepted_tokens_pay_is_always_asked() -> None:
    """Its second token is always wrong, so that no guess of it proves right to the end."""
    text, clock = random_text(621, 0), Clock()
    half = Timed(clock, "half", 100e-6, lambda want: [*text[len(want.slot.tokens) :][:1], 5000])
    assert played(clock, [half], [text], 20) < 0.65
    assert half.n_asked >= 300


def test_text_that_becomes_known_is_noticed_soon_by_a_drafter_that_rested() -> None:
    prompt, other = random_text(300, 0), random_text(300, 1)
    clock, suffix = Clock(), Suffix(1)
    timed = Timed(clock, "suffix", 60e-6, lambda want: suffix.draft([want])[0].token_ids)
    slow = played(clock, [timed], [prompt + other], 300)
    assert timed.n_asked < 90, "it rested in the text that it does not know"
    suffix.begin(slot_with(1))
    both = played(clock, [timed], [prompt + other + prompt], 300)
    assert slow < 1.025
    assert both < (slow + 0.25) / 2, "300 tokens of passes, then 300 in less than a quarter"


@pytest.mark.parametrize("seconds", [20e-6, 100e-6])
def test_a_network_that_says_what_a_text_drafter_says_takes_next_to_no_time(seconds: float) -> None:
    """Both are always right; the network could be taken for nothing."""
    text, clock = random_text(1501, 0), Clock()

    def right(want: Want) -> Sequence[int]:
        return text[len(want.slot.tokens) :][: want.n_max]

    reader = Timed(clock, "reader", 5e-6, right)
    network = Timed(clock, "network", seconds, right)
    network.is_network = True
    alone = played(clock, [reader], [text], 1)
    n_alone = reader.n_asked
    assert played(clock, [reader, AsNetwork(network)], [text], 1) < 1.02 * alone
    assert reader.n_asked - n_alone >= n_alone
    assert network.n_asked < n_alone / 8


def test_a_network_that_fails_is_tried_more_rarely_the_dearer_it_is_and_again_once_it_is_right() -> None:
    n_asked = []
    for seconds in (50e-6, 200e-6):
        clock = Clock()
        network = Timed(clock, "network", seconds, lambda want: [5000] * want.n_max)
        network.is_network = True
        text = random_text(1500, 0)
        assert played(clock, [AsNetwork(network)], [text], 1) < 1.02
        n_asked.append(network.n_asked)
        network.say = partial(knows_from, 1500, [*text, *random_text(600, 1)])
        assert (
            played(clock, [AsNetwork(network)], [text + random_text(600, 1)], 1)
            < (1500 * 1.02 + 0.6 * 600) / 2100
        )
    assert n_asked[0] > 2 * n_asked[1] > 8
