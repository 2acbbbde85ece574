"""What speculation did lately, and why nothing is drafted."""

from __future__ import annotations

import logging

import pytest
import torch

from slipstream.engine.drafting import Drafting
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide import account
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import NO_DRAFTS, UNREAD, Drafter, Guess, Want
from slipstream.engine.speculate.tails import Tails
from tests.unit.doubles import Ahead, AsNetwork
from tests.unit.test_ahead import PROMPTS, Knowing, play
from tests.unit.test_speculate import Says, chain_of, play_on, slot_with
from tests.unit.toy import toy_engine

ASKING = slot_with([1], types=("text", "network"))


class Fails(Says):
    def guess(self, want: Want) -> Guess:
        raise RuntimeError("broken")


def passes(chain: Chain, slot: Slot = ASKING, n: int = 1, seconds: float = 1.0) -> Drafting:
    """What is reported after so many passes for one slot."""
    for _ in range(n):
        wants = [Want(slot, 8)] if slot.speculate.types else []
        drafts = chain.draft(wants, Pass(1, 1))
        assert drafts is not None
        chain.account.worked(seconds)
    return chain.account.report([slot])


def network(*token_ids: int) -> AsNetwork:
    return AsNetwork(Says("network", token_ids))


def asked_at(chain: Chain, seconds: float, name: str) -> Drafting:
    """What is reported once a drafter that is never right has cost so much for a while."""
    chain.lengths.costs.draft_s = lambda *given: seconds  # type: ignore[method-assign]
    slot = slot_with([1], types=(name,))
    chain.begin(slot)
    for _ in range(600):
        told = passes(chain, slot)
        play_on(chain, slot, 1)
    return told


def test_without_drafters_and_without_requests_that_ask() -> None:
    assert chain_of().account.report([]).why_not == "no_drafter"
    chain = chain_of(Says("text", [5]))
    silent = slot_with([1])
    assert chain.account.report([]).why_not == passes(chain, silent).why_not == "not_asked_for"
    assert passes(chain).why_not is None
    assert chain.account.report([silent]).why_not == "not_asked_for"


@pytest.mark.parametrize(
    ("drafter", "slope", "why", "treatment"),
    [
        (Says("text", []), 0.02, "no_guess", "asked"),
        (Says("text", [5, 5], [0.3] * 2), 1.0, "rows_too_dear", "asked"),
        (Fails("text", []), 0.02, "switched_off", "switched_off"),
    ],
)
def test_why_text_drafters_draft_nothing(drafter: Drafter, slope: float, why: str, treatment: str) -> None:
    chain = chain_of(drafter, slope=slope)
    for _ in range(3):  # failures switch a drafter off for a request, and three of them for all
        told = passes(chain, slot_with([1], types=("text",)), 2)
    told = passes(chain, slot_with([1], types=("text",)), 5)
    assert (told.why_not, told.drafters["text"].treatment) == (why, treatment)
    assert told.drafted_share == 0.0
    assert told.off_s == sum(told.n_outcomes.values()) == sum(told.n_lengths) == 11
    assert len(told.lengths) == 1
    assert told.drafters["text"].guess_s > 0.0


def test_a_pass_without_drafts_that_is_due() -> None:
    chain = chain_of(Says("text", [5, 5, 5], [0.99] * 3), slope=0.001)
    assert passes(chain).n_outcomes == {"drafted": 1}
    for _ in range(1100):
        chain.lengths.costs.passed(4, 1.0)
    assert passes(chain).n_outcomes == {"drafted": 1, "plain_measured": 1}
    chain.lengths.costs.passed(1, 1.0)
    assert passes(chain).n_outcomes == {"drafted": 2, "plain_measured": 1}


def test_a_network_that_promises_less_than_its_own_time() -> None:
    told = asked_at(chain_of(network(9, 9, 9, 9), slope=0.02), 0.1, "network")
    assert told.why_not == "network_too_slow"
    assert told.drafters["network"].treatment == "tried"
    assert 0.0 < told.drafters["network"].asked_share < 0.2
    assert told.drafters["network"].places[0].n_judged > 10
    assert told.drafters["network"].places[0].acceptance < 0.3


def test_a_text_drafter_that_is_asked_now_and_then() -> None:
    told = asked_at(chain_of(Says("text", []), slope=0.02), 0.5, "text")
    assert (told.why_not, told.drafters["text"].treatment) == ("not_worth_asking", "tried")


def test_lengths_since_the_start_and_lately() -> None:
    chain = chain_of(Says("text", [5, 5, 5], [0.99] * 3), slope=0.001)
    told = passes(chain, n=100)
    assert (told.n_lengths, told.why_not, told.off_s) == ([0, 0, 0, 100], None, 0.0)
    assert 80 < told.lengths[3] < 100
    chain.account._weight = 1e100  # after a day
    told = passes(chain, n=10)
    assert told.n_lengths[3] == 110
    assert 9 < told.lengths[3] < 11
    assert passes(chain, n=2).drafted_share == pytest.approx(1.0)


def test_a_spell_without_drafts_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, account.__name__)
    says = Says("text", [5], [0.99])
    chain = chain_of(says, slope=0.001)
    slot = slot_with([1], types=("text",))
    passes(chain, slot)
    says.token_ids = []
    passes(chain, slot_with([1]), 100)  # asks for nothing
    passes(chain, slot, 30)
    assert not caplog.messages
    passes(chain, slot, 70)
    assert caplog.messages == ["drafting stopped seconds=31 reason=no_guess drafters=text"]
    says.token_ids, says.survival = [5], [0.99]
    passes(chain, slot, 5)
    assert caplog.messages[1:] == ["drafting resumed seconds=100"]
    says.token_ids = []
    passes(chain, slot, 31)
    assert len(caplog.messages) == 3


def test_a_guess_that_is_read_later_is_no_offer_for_the_next_pass() -> None:
    says = Says("network", [5, 5])
    chain, slot = chain_of(Ahead(says), slope=0.02), slot_with([1], types=("network",))
    tails = Tails({0: range(1)}, torch.tensor([1]), torch.tensor([5]))
    drafts = chain.draft([Want(slot, 2, (UNREAD,))], Pass(1, 1), tails)
    assert drafts is not None
    assert drafts.read is not None
    drafts.read()
    says.token_ids = []
    assert passes(chain, slot).n_outcomes == {"drafted": 1, "no_guess": 1}


def test_a_drafter_that_is_weighed_twice_for_a_pass_promised_enough_once() -> None:
    chain = chain_of(network(5))
    slot = slot_with([1], types=("network",))
    for takes in ([True], [False], [False], [False]):
        chain.account.start()
        for _ in range(2):
            chain.account.consider("network", takes)
        chain.account.drafted([Want(slot, 2)], NO_DRAFTS)
    assert chain.account._trusted["network"] == pytest.approx(1.0, rel=0.1)


def test_a_draft_that_is_read_after_the_next_pass_is_launched_is_one_call() -> None:
    drafter = Knowing({name: [] for name in PROMPTS})
    toy = toy_engine(lambda cache: [drafter], n_slots=1, overlaps=True)
    play(toy, types=("knowing",))
    assert drafter.n_ahead > 0
    assert toy.engine.stats().drafters["knowing"].n_draft_calls == drafter.n_made
