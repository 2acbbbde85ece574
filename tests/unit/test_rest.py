"""Passes for which nothing is decided: what is drafted and asked is the same, and nothing is missed by them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.rest import Rest
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import UNREAD, Draft, Drafter, Kept, Want
from slipstream.engine.speculate.tails import Tails
from tests.unit.doubles import AsNetwork
from tests.unit.test_allowance import Clock, Timed, knows_from, played, random_text
from tests.unit.test_speculate import Says, chain_of, slot_with

TRIAL_S = 0.02  # of a pass that takes a second: a trial in four tokens


def wear_out(chain: Chain, *slots: Slot, trial_s: float = TRIAL_S) -> None:
    """Plays passes until one is decided in which no trial can be paid for."""
    chain.lengths.costs.draft_s = lambda *given: trial_s  # type: ignore[method-assign]
    for slot in slots:
        chain.begin(slot)
    for _ in range(400):
        step(chain, *slots)
        if chain.account.is_idle:
            return
    raise AssertionError("a trial could always be paid for")


def step(chain: Chain, *slots: Slot, coming: Pass | None = None) -> None:
    n = len(slots)
    drafts = chain.draft([Want(slot, 8) for slot in slots], coming or Pass(n, n))
    assert drafts is not None
    for slot in slots:
        slot.append(1)
    chain.accept([Kept(slot, Draft(), 0) for slot in slots])


@pytest.fixture
def n_decided(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many passes were decided since the last call."""
    counts = [0]
    holds = Rest.holds

    def counted(self: Rest, *given: object) -> bool:
        stands = holds(self, *given)  # type: ignore[arg-type]
        counts[0] += not stands
        return stands

    monkeypatch.setattr(Rest, "holds", counted)

    def since() -> int:
        n, counts[0] = counts[0], 0
        return n

    return since


@pytest.mark.parametrize("n_slots", [1, 4])
def test_what_is_asked_and_drafted_is_the_same_without_rests(
    n_slots: int, n_decided: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [random_text(700, i) for i in range(n_slots)]

    def asked() -> tuple[float, list[tuple[str, int]]]:
        clock, calls = Clock(), []

        def timed(name: str, seconds: float, is_network: bool) -> Timed:
            def say(want: Want) -> list[int]:
                calls.append((name, len(want.slot.tokens)))
                return [*knows_from(600, texts[want.slot.id], want)]

            one = Timed(clock, name, seconds, say)
            one.is_network = is_network
            return one

        # A trial of a text drafter can be paid for in every fifth and twentieth token.
        drafters: list[Drafter] = [timed("a", 5.5e-6 / n_slots, False), timed("b", 23e-6 / n_slots, False)]
        drafters.append(AsNetwork(timed("network", 200e-6, True)))
        return played(clock, drafters, texts, 20), calls

    rested, n = asked(), n_decided()
    monkeypatch.setattr(Rest, "holds", lambda *given: False)
    assert asked() == rested
    assert len(rested[1]) > 30
    assert n < 450, "of 680 passes, less what was drafted"


def test_a_decision_stands_until_a_trial_can_be_paid_for_and_no_longer(n_decided: Callable[[], int]) -> None:
    drafter = Says("text", [])
    chain, slot = chain_of(drafter, slope=0.02), slot_with([1], types=("text",))
    wear_out(chain, slot)
    n_decided()
    drafter.asked.clear()
    at = []
    for i in range(40):
        step(chain, slot)
        if drafter.asked:
            at.append(i)
            drafter.asked.clear()
    assert at == [*range(at[0], 40, 4)]
    assert n_decided() <= 3 * len(at)


def test_who_asks_and_beside_what_is_decided_anew(n_decided: Callable[[], int]) -> None:
    chain = chain_of(Says("text", []), slope=0.02)
    slot, other = (slot_with([1], types=("text",), slot_id=i) for i in range(2))
    wear_out(chain, slot)
    n_decided()
    step(chain, slot)
    assert n_decided() == 0
    step(chain, slot, coming=Pass(1, 65))
    assert n_decided() == 1, "a prompt runs beside"
    step(chain, other, coming=Pass(1, 65))
    assert n_decided() == 1, "another request has the pass"


def test_a_pass_that_measures_plain_decoding_is_followed_by_a_decision(
    n_decided: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, slot = chain_of(Says("text", [7, 8], [0.9] * 2), slope=0.02), slot_with([1], types=("text",))
    monkeypatch.setattr(chain.lengths, "measures_plain", lambda coming: True)
    step(chain, slot)
    monkeypatch.undo()
    drafts = chain.draft([Want(slot, 8)], Pass(1, 1))
    assert drafts is not None
    assert len(drafts.by_slot[0]) == 2


def test_a_decision_that_was_put_off_does_not_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an unread pass is read first, nobody was asked behind it, and that says nothing about the next pass."""
    drafter = Says("text", [])
    chain, slot = chain_of(drafter, slope=0.02), slot_with([1], types=("text",))
    wear_out(chain, slot)
    drafter.asked.clear()
    monkeypatch.setattr(chain.lengths.allowance, "wait", 0)  # the trial is due
    slot.tokens += [1] * 8
    tails = Tails({0: range(1)}, torch.tensor([1]), torch.tensor([len(slot.tokens)]))
    assert chain.draft([Want(slot, 8, (UNREAD,))], Pass(1, 1), tails) is None
    assert not drafter.asked
    step(chain, slot)
    assert drafter.asked


def test_a_guess_that_proves_right_ends_a_rest() -> None:
    drafter = Says("text", [9] * 3, [0.001] * 3)  # too unsure to be verified: the text judges it
    chain, slot = chain_of(drafter, slope=0.5), slot_with([1], types=("text",))
    wear_out(chain, slot, trial_s=0.1)
    drafter.token_ids = [1] * 3
    drafter.asked.clear()
    while not drafter.asked:
        step(chain, slot)
    for n_calls in (1, 1, 2):  # it is right, and may be asked again, when the text has three tokens more
        step(chain, slot)
        assert len(drafter.asked) == n_calls
