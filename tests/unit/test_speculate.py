"""Drafters, the chain, draft lengths and requests' own settings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.api import Speculate
from engine.errors import InvalidRequest, Unsupported
from engine.settings import Settings
from engine.slot import Slot
from engine.speculate.chain import Chain
from engine.speculate.cost import TIERS, PassCost
from engine.speculate.draft_model import STORE, DraftModel
from engine.speculate.drafter import Draft, Drafter, Kept, Want
from engine.speculate.length import Lengths
from engine.speculate.ngram_simple import NgramSimple
from engine.speculate.resolve import resolve_speculate
from tests.unit.toy import ToyNetwork, toy_engine, toy_slot


def slot_with(tokens: list[int], *, types: tuple[str, ...] = (), slot_id: int = 0, n_max: int = 8) -> Slot:
    return toy_slot(slot_id, "r", tokens, types=types, n_max=n_max)


def ngram_draft(tokens: list[int], n_max: int = 8, size_n: int = 3, size_m: int = 8) -> list[int]:
    drafter = NgramSimple(size_n, size_m, 1)
    slot = slot_with(tokens)
    drafter.begin(slot)
    return list(drafter.draft([Want(slot, n_max)])[0].token_ids)


def test_ngram_copies_what_followed_the_latest_occurrence() -> None:
    assert ngram_draft([1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 1, 2, 3]) == [
        5,
        6,
        1,
        2,
        3,
        5,
        6,
        1,
    ]  # past the end it goes on into itself


@pytest.mark.parametrize(
    ("n_max", "size_m", "expected"), [(2, 8, [5, 6]), (8, 3, [5, 6, 7]), (8, 8, [5, 6, 7, 1, 2, 3, 5, 6])]
)
def test_ngram_respects_both_limits(n_max: int, size_m: int, expected: list[int]) -> None:
    assert ngram_draft([1, 2, 3, 5, 6, 7, 1, 2, 3], n_max, size_m=size_m) == expected


def test_ngram_drafts_a_loop_as_long_as_allowed() -> None:
    assert ngram_draft([4, 7, 7, 7, 7, 7], 6) == [7] * 6


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [1, 2, 3, 4, 2, 3], [4, 1, 2, 5, 1, 2]])
def test_ngram_without_a_match_says_nothing(tokens: list[int]) -> None:
    assert ngram_draft(tokens) == []


def test_ngram_learns_tokens_across_steps_and_forgets_at_begin() -> None:
    drafter = NgramSimple(2, 8, 1)
    slot = slot_with([1, 2])
    drafter.begin(slot)
    assert not drafter.draft([Want(slot, 4)])[0]
    for token_id in (3, 1, 2):
        slot.append(token_id)
        drafter.accept([Kept(slot, Draft(), 0)])
    assert list(drafter.draft([Want(slot, 4)])[0].token_ids) == [3, 1, 2, 3]
    other = slot_with([1, 2])
    drafter.begin(other)
    assert not drafter.draft([Want(other, 4)])[0]


class Says(Drafter):
    """Always the same draft; remembers what it was asked and told."""

    def __init__(self, name: str, token_ids: Sequence[int]) -> None:
        self.name = name
        self.token_ids = token_ids
        self.asked: list[int] = []
        self.told: list[int] = []

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        self.asked += [want.slot.id for want in wants]
        return [Draft(self.token_ids[: want.n_max]) for want in wants]

    def accept(self, kept: Sequence[Kept]) -> None:
        self.told += [one.slot.id for one in kept]


def test_the_chain_asks_the_next_only_for_slots_without_a_draft() -> None:
    first, second = Says("first", []), Says("second", [7])
    chain = Chain([first, second], Lengths(adaptive=False))
    slots = [
        slot_with([1], types=types, slot_id=i)
        for i, types in enumerate([("first", "second"), ("second",), ("first",)])
    ]
    drafts = chain.draft([Want(slot, 3) for slot in slots], 3)
    assert first.asked == [0, 2]
    assert second.asked == [0, 1]
    assert [draft.source for draft in drafts] == ["second", "second", ""]


def test_every_drafter_a_request_uses_is_told_of_every_pass() -> None:
    first, second = Says("first", [5]), Says("second", [7])
    chain = Chain([first, second], Lengths(adaptive=False))
    slots = [slot_with([1], types=("first", "second")), slot_with([1], types=("first",), slot_id=1)]
    chain.accept([Kept(slot, Draft([5], "first"), 1) for slot in slots])
    assert (first.told, second.told) == ([0, 1], [0])


def test_drafts_shorter_than_the_minimum_are_thrown_away() -> None:
    chain = Chain([Says("one", [1]), Says("two", [1, 2])], Lengths(adaptive=False))
    slot = slot_with([1], types=("one", "two"))
    slot.speculate = resolve_speculate(Settings(), ["one", "two"], Speculate(n_min=2))
    assert chain.draft([Want(slot, 5)], 1)[0].source == "two"


def test_a_least_length_is_asked_for_where_less_would_pay() -> None:
    chain = Chain([Says("d", list(range(20)))], lengths_with_cost(0.05))
    slot = slot_with([1], types=("d",))
    slot.speculate = resolve_speculate(Settings(), ["d"], Speculate(n_min=7))
    assert len(chain.draft([Want(slot, 16)], 1)[0]) == 7


def lengths_with_cost(slope: float) -> Lengths:
    """A machine on which each further row costs `slope` of the first."""
    lengths = Lengths(adaptive=True)
    for tier in TIERS:
        lengths.pass_cost.observe(tier, 1.0 + slope * (tier - 1))
    return lengths


@pytest.mark.parametrize(
    ("rate", "slope", "least", "most"),
    [
        (1.0, 0.02, 16, 16),  # everything accepted, rows nearly free: as long as allowed
        (0.0, 0.02, 0, 0),  # nothing accepted: not at all
        (0.9, 1.0, 0, 0),  # every row costs a whole pass: drafts can never pay
        (0.6, 0.05, 4, 16),
    ],
)
def test_length_follows_acceptance_and_cost(rate: float, slope: float, least: int, most: int) -> None:
    lengths = lengths_with_cost(slope)
    for i in range(200):
        lengths.judged(0, "d", 8, 8 if (i * rate) % 1 + rate >= 1 else 0)
    found = {lengths.limits("d", [0], [16], 1)[0] for _ in range(10)}
    assert min(found) >= least
    assert max(found) <= most


def test_a_new_request_starts_short_and_grows_with_what_is_accepted() -> None:
    lengths = lengths_with_cost(0.01)
    found = []
    for _ in range(4):
        found.append(lengths.limits("d", [0], [64], 1)[0])
        lengths.judged(0, "d", found[-1], found[-1])
    assert found[0] == 4
    assert found == sorted(found)
    assert found[-1] > 3 * found[0]


def test_a_faded_drafter_is_probed_ever_more_rarely_and_comes_back() -> None:
    lengths = lengths_with_cost(0.02)
    probes = []
    for round_ in range(2000):
        if limit := lengths.limits("d", [0], [16], 1)[0]:
            probes.append(round_)
            lengths.judged(0, "d", limit, 0)
    late = [b - a for a, b in zip(probes[-3:], probes[-2:], strict=False)]
    assert min(late) >= 128
    assert 5 < len(probes) < 60
    for _ in range(4):
        lengths.judged(0, "d", 4, 4)
    assert lengths.limits("d", [0], [16], 1)[0] > 4


def test_a_new_request_starts_from_the_servers_average() -> None:
    lengths = Lengths(adaptive=True)
    for _ in range(50):
        lengths.judged(0, "d", 8, 0)
    lengths.begin(1)
    assert lengths.rate(1, "d") < 0.3
    assert lengths.rate(1, "other") == pytest.approx(0.8)


def test_pass_cost_is_linear_between_tiers_and_ignores_hiccups() -> None:
    cost = PassCost()
    cost.observe(1, 1.0)
    cost.observe(8, 2.4)
    assert cost(1) == 1.0
    assert cost(4.5) == pytest.approx(1.7)
    cost.observe(1, 50.0)
    assert cost(1) == 1.0
    assert cost(16) == pytest.approx(4.8)


def test_accepted_guesses_are_not_fed_to_the_draft_network_again() -> None:
    network = ToyNetwork()
    toy = toy_engine(lambda cache: [DraftModel(network, cache, 16)], n_slots=1)  # type: ignore
    toy.engine.add(
        "a", lambda slot_id: toy_slot(slot_id, "a", [1, 2, 3], types=("draft-model",), n_max=4, max_tokens=40)
    )
    rows: list[int] = []
    network.spoil = lambda batch, logits: rows.append(len(batch.token_ids))
    toy.engine.step()  # the prompt
    toy.engine.step()
    assert rows[-4:] == [4, 1, 1, 1]  # prompt and first token at once, then one guess a pass
    assert toy.cache.length(0, STORE) == 4 + 3  # three guesses were fed and kept; the fourth was never fed
    toy.engine.step()
    assert rows[-4:] == [2, 1, 1, 1]  # the fourth guess and the target's own token


def test_a_prefix_made_without_drafting_is_caught_up_in_chunks() -> None:
    network = ToyNetwork()
    toy = toy_engine(lambda cache: [DraftModel(network, cache, 8)], n_slots=1, batch_size=8)  # type: ignore
    prompt = list(range(1, 25))

    def play(name: str, types: tuple[str, ...]) -> int:
        toy.engine.add(name, lambda slot_id: toy_slot(slot_id, name, prompt, types=types))
        n_steps = 0
        while toy.engine.busy:
            toy.engine.step()
            n_steps += 1
        return n_steps

    slow = play("off", ())
    widths: list[int] = []
    network.spoil = lambda batch, logits: widths.append(len(batch.token_ids))
    assert play("on", ("draft-model",)) < slow / 2
    assert max(widths) <= 8


@pytest.mark.parametrize(("types", "n_max"), [(("draft-model",), 0), ((), 4)])
def test_a_request_without_drafts_costs_the_draft_network_nothing(types: tuple[str, ...], n_max: int) -> None:
    network = ToyNetwork()
    toy = toy_engine(lambda cache: [DraftModel(network, cache, 16)], n_slots=1)  # type: ignore
    prompt = list(range(1, 25))  # several pages: a drafter in use would feed them as they are kept
    toy.engine.add("a", lambda slot_id: toy_slot(slot_id, "a", prompt, types=types, n_max=n_max))
    while toy.engine.busy:
        toy.engine.step()
    assert network.n_passes == 0


@pytest.mark.parametrize(
    ("asked", "types", "n_max"),
    [
        (Speculate(), ("ngram-simple", "draft-model"), 16),
        (Speculate(n_max=0), ("ngram-simple", "draft-model"), 0),
        (Speculate(n_max=99), ("ngram-simple", "draft-model"), 16),
        (Speculate(types=("draft-simple",)), ("draft-model",), 16),
        (Speculate(types=("none",)), (), 16),
        (Speculate(types=("auto",), n_max=2, n_min=5), ("ngram-simple", "draft-model"), 2),
    ],
)
def test_a_request_narrows_what_the_server_loaded(
    asked: Speculate, types: tuple[str, ...], n_max: int
) -> None:
    resolved = resolve_speculate(Settings(), ("ngram-simple", "draft-model"), asked)
    assert (resolved.types, resolved.n_max) == (types, n_max)
    assert resolved.n_min <= resolved.n_max


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (Speculate(types=("suffix",)), Unsupported),
        (Speculate(n_max=-1), InvalidRequest),
        (Speculate(n_min=-1), InvalidRequest),
        (Speculate(p_min=1.5), InvalidRequest),
    ],
)
def test_what_cannot_be_honoured_is_refused(asked: Speculate, error: type[Exception]) -> None:
    with pytest.raises(error):
        resolve_speculate(Settings(), ("ngram-simple",), asked)
