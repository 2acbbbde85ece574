"""The chain, the draft network, and requests' own settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from slipstream.engine.api import Speculate
from slipstream.engine.errors import InvalidRequest, Unsupported
from slipstream.engine.settings import Settings
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.cost import WIDTHS
from slipstream.engine.speculate.decide.value import Lengths, Pass
from slipstream.engine.speculate.drafter import UNREAD, Draft, Drafter, Guess, Kept, TextDrafter, Want
from slipstream.engine.speculate.guard import Guard
from slipstream.engine.speculate.network.draft_model import STORE, DraftModel
from slipstream.engine.speculate.resolve import resolve_speculate
from slipstream.engine.speculate.tails import Tails
from tests.unit.doubles import Ahead, AsNetwork, drafts_of, read
from tests.unit.toy import Toy, ToyNetwork, toy_engine, toy_slot
from tests.wound_clock import WoundClock


def slot_with(tokens: list[int], *, types: tuple[str, ...] = (), slot_id: int = 0, n_max: int = 8) -> Slot:
    return toy_slot("r", tokens, slot_id=slot_id, types=types, n_max=n_max)


class Says(TextDrafter):
    """Always the same guess; remembers what it was asked and told."""

    def __init__(self, name: str, token_ids: Sequence[int], survival: Sequence[float] = ()) -> None:
        self.name = name
        self.token_ids = token_ids
        self.survival = survival
        self.asked: list[int] = []
        self.lengths: list[int] = []
        self.told: list[int] = []
        self.went_on_from: list[tuple[int, ...]] = []

    def guess(self, want: Want) -> Guess:
        self.asked.append(want.slot.id)
        self.lengths.append(want.n_max)
        self.went_on_from += [tuple(want.after)] if want.after else []
        return Guess(self.token_ids[: want.n_max], self.survival[: want.n_max])

    def accept(self, kept: Sequence[Kept]) -> None:
        self.told += [one.slot.id for one in kept]


def chain_of(*drafters: Drafter, by_value: bool = True, slope: float | None = None) -> Chain:
    """Over lengths that are not adaptive, or over a machine on which each further row costs `slope` of the first."""
    lengths = Lengths(adaptive=slope is not None)
    for n_rows in WIDTHS:
        lengths.costs.passed(n_rows, 1.0 + (slope or 0.0) * (n_rows - 1))
    return Chain(drafters, lengths, by_value=by_value, now=WoundClock(tick=1e-6))


def one_draft(chain: Chain, slot: Slot, n_max: int = 8) -> Draft:
    return drafts_of(chain, [Want(slot, n_max)], Pass(1, 1))[0]


def play_on(chain: Chain, slot: Slot, *token_ids: int) -> None:
    """The target keeps these tokens, whatever was drafted."""
    for token_id in token_ids:
        slot.append(token_id)
    chain.accept([Kept(slot, Draft(), 0)])


def test_the_longer_credible_guess_wins_whoever_is_first() -> None:
    doubtful, sure = Says("a", [1, 2, 3, 4, 5, 6], [0.2] * 6), Says("b", [7, 8], [0.99] * 2)
    slot = slot_with([1], types=("a", "b"))
    for order in ((doubtful, sure), (sure, doubtful)):
        assert one_draft(chain_of(*order), slot) == Draft((7, 8), ("b", "b"))


def test_in_fixed_order_the_first_that_has_something_wins_for_each_slot() -> None:
    first, second = Says("first", []), Says("second", [7], [0.99])
    third = Says("third", [8, 9])
    chain = chain_of(first, second, AsNetwork(third), by_value=False)
    slots = [
        slot_with([1], types=types, slot_id=i)
        for i, types in enumerate([("first", "second", "third"), ("second",), ("first", "third"), ("first",)])
    ]
    drafts = drafts_of(chain, [Want(slot, 3) for slot in slots], Pass(4, 4))
    assert first.asked == [0, 2, 3]
    assert second.asked == [0, 1]
    assert third.asked == [2]
    assert [draft.sources for draft in drafts] == [("second",), ("second",), ("third", "third"), ()]


def test_a_network_is_asked_only_where_it_promises_more_than_a_free_guess() -> None:
    copies = Says("copies", [1] * 16, [0.99] * 16)
    network = Says("network", [2] * 16, [0.8] * 16)
    chain = chain_of(copies, AsNetwork(network), slope=0.02)
    knows, blank = slot_with([1], types=("copies", "network")), slot_with([1], types=("network",), slot_id=1)
    chain.lengths.costs.drafted("network", 1, 0.08)  # too dear for a trial
    drafts = drafts_of(chain, [Want(knows, 16), Want(blank, 16)], Pass(2, 2))
    assert network.asked == [1]
    assert [draft.sources[0] for draft in drafts] == ["copies", "network"]


def test_what_a_network_is_fed_is_charged_apart_from_its_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    network = AsNetwork(Says("network", [2] * 16, [0.8] * 16))
    chain, slot = chain_of(network), slot_with([1], types=("network",), n_max=4)
    measured: list[tuple[int, int]] = []
    monkeypatch.setattr(
        chain.lengths.costs, "drafted", lambda name, n, seconds, n_fed: measured.append((n, n_fed))
    )
    for n_unfed in (100, 0):
        monkeypatch.setattr(network, "n_unfed", lambda slot, n=n_unfed: n)
        assert one_draft(chain, slot, 4)
    assert measured == [(4, 100), (4, 0)]


def test_a_network_that_has_much_to_be_fed_is_asked_only_if_it_promises_more() -> None:
    network = AsNetwork(Says("network", [2] * 16))
    chain = chain_of(network, slope=0.02)
    for n_fed in (0, 100, 0, 400, 2, 300) * 4:
        chain.lengths.costs.drafted("network", 4, 0.4 + 0.02 * n_fed, n_fed)
    slot = slot_with([1], types=("network",), n_max=4)
    network.n_unfed = lambda slot: 2000  # type: ignore[method-assign]
    assert not one_draft(chain, slot, 4)
    network.n_unfed = lambda slot: 2  # type: ignore[method-assign]
    assert not one_draft(chain, slot, 4), "it was weighed a moment ago"
    for _ in range(6):
        assert not one_draft(chain, slot, 4)
    assert one_draft(chain, slot, 4), "eight passes later"


@pytest.mark.parametrize("tails", [None, Tails({0: range(1)}, torch.tensor([1]), torch.tensor([5]))])
def test_every_call_for_a_slot_counts_as_one_that_what_it_is_fed_has_served(tails: Tails | None) -> None:
    network = Ahead(Says("network", [2] * 16, [0.8] * 16))
    chain, slot = chain_of(network), slot_with([1], types=("network",), n_max=4)
    want = Want(slot, 4, (UNREAD,) if tails else ())
    for _ in range(60):
        chain.begin(slot)
        for _ in range(9):
            drafts = chain.draft([want], Pass(1, 1), tails)
            assert drafts is not None
            assert drafts.by_slot[slot.id]
    chain.begin(slot)
    assert chain.lengths.feeding.n_calls("network") == pytest.approx(9, rel=0.01)


def test_a_trial_that_is_not_read_first_pays_for_the_rows_that_verify_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paid: list[float] = []
    for after in ((), (UNREAD,)):
        chain, slot = (
            chain_of(network := AsNetwork(Says("network", [2])), slope=0.02),
            slot_with([1], types=("network",)),
        )
        monkeypatch.setattr(
            chain._survival, "expected", lambda name, slots, n: np.full((len(slots), n), 0.01)
        )
        monkeypatch.setattr(
            chain.lengths.allowance, "pays", lambda slot, name, seconds, token_s: bool(paid.append(seconds))
        )
        chain.lengths.costs.drafted("network", 4, 0.4)
        assert not chain._asking.asked(network, [Want(slot, 4, after)], {}, Pass(1, 1))
    assert paid[1] - paid[0] == pytest.approx(chain.lengths.costs.at(3) - chain.lengths.costs.at(1))


def test_slots_are_weighed_again_in_the_same_pass() -> None:
    network = AsNetwork(Says("network", [2] * 16))
    chain = chain_of(network, slope=0.02)
    for n_fed in (0, 100, 0, 400, 2, 300) * 4:
        chain.lengths.costs.drafted("network", 4, 0.4 + 0.02 * n_fed, n_fed)
    first, later = (slot_with([1], types=("network",), slot_id=slot_id, n_max=4) for slot_id in (0, 1))
    weighed: list[tuple[int, int]] = []

    def n_unfed(slot: Slot) -> int:
        weighed.append((n_passes, slot.id))
        return 2000  # too many to be worth it

    network.n_unfed = n_unfed  # type: ignore[method-assign]
    for n_passes in range(10):
        slots = [first] if n_passes < 3 else [first, later]
        assert not any(drafts_of(chain, [Want(slot, 4) for slot in slots], Pass(len(slots), len(slots))))
    assert weighed == [(0, 0), (3, 1), (8, 0), (8, 1)]


def test_a_networks_draft_is_gone_on_with_by_a_free_drafter() -> None:
    copies = Says("copies", [5, 6, 7], [0.99] * 3)
    network = Says("network", [1, 2], [0.99] * 2)
    copies.draft = lambda wants: [  # type: ignore[method-assign]
        Guess([5, 6, 7], [0.99] * 3) if want.after == (1, 2) else Guess() for want in wants
    ]
    slot = slot_with([9], types=("copies", "network"))
    draft = one_draft(chain_of(copies, AsNetwork(network)), slot)
    assert draft == Draft((1, 2, 5, 6, 7), ("network",) * 2 + ("copies",) * 3)
    assert len(one_draft(chain_of(copies, AsNetwork(network)), slot, n_max=2)) == 2


def test_what_a_free_drafter_says_after_anothers_guess_is_not_taken_for_its_guess_of_the_text() -> None:
    copies = Says("copies", [])
    network = Says("network", [100], [0.99])
    copies.draft = lambda wants: [  # type: ignore[method-assign]
        Guess([100, 100, 100] if want.after else []) for want in wants
    ]
    chain = chain_of(copies, AsNetwork(network), slope=0.02)
    slot = slot_with([1], types=("copies", "network"))
    expected = chain._survival.expected("copies", [slot], 3)[0].tolist()
    assert len(one_draft(chain, slot)) > 1, "the network's guess was gone on with"
    for token_id in range(40):
        play_on(chain, slot, token_id)
        one_draft(chain, slot)
    assert chain._survival.expected("copies", [slot], 3)[0].tolist() == expected


def test_guesses_that_lost_or_were_not_verified_are_judged_by_the_text() -> None:
    """`right` starts with little trust in itself and is never verified at first; the text shows that it is right."""
    text = [int(one) for one in np.random.default_rng(0).integers(0, 99, 200)]
    wrong = Says("wrong", [100, 100, 100, 100], [0.97] * 4)
    right = Says("right", [], [0.2] * 4)
    chain = chain_of(wrong, right, slope=0.02)
    slot = slot_with([1], types=("wrong", "right"))
    chain.begin(slot)
    sources = []
    for i, token_id in enumerate(text):
        right.token_ids = text[i : i + 4]
        sources.append(one_draft(chain, slot).sources[:1])
        play_on(chain, slot, token_id)
    assert sources[0] == ("wrong",)
    assert sources[-1] == ("right",)
    assert ("wrong",) not in sources[40:]


def test_a_network_is_told_of_every_pass_and_a_free_drafter_of_those_with_its_own_drafts() -> None:
    first, second, network = Says("first", [5]), Says("second", [7]), Says("network", [9])
    chain = chain_of(first, second, AsNetwork(network))
    slots = [
        slot_with([1], types=types, slot_id=i)
        for i, types in enumerate([("first", "second", "network"), ("first", "network"), ("first",)])
    ]
    drafts = [Draft((5, 7), ("first", "second")), Draft((9,), ("network",)), Draft((5,), ("first",))]
    chain.accept([Kept(slot, draft, 1) for slot, draft in zip(slots, drafts, strict=True)])
    assert (first.told, second.told, network.told) == ([0, 2], [0], [0, 1])


def test_a_network_is_not_handed_passes_of_slots_that_it_does_not_follow() -> None:
    network = AsNetwork(says := Says("network", [9]))
    network.follows = lambda slot: slot.id == 1  # type: ignore[method-assign]
    slots = [slot_with([1], types=("network",), slot_id=i) for i in range(3)]
    chain_of(network).accept([Kept(slot, Draft(), 0) for slot in slots])
    assert says.told == [1]
    assert "network" not in slots[0].stats.drafters


def test_drafts_shorter_than_the_minimum_are_thrown_away() -> None:
    chain = chain_of(Says("one", [1]))
    slot = slot_with([1], types=("one",))
    assert one_draft(chain, slot)
    slot.speculate = resolve_speculate(Settings(), ["one"], Speculate(n_min=2))
    assert not one_draft(chain, slot)


@pytest.mark.parametrize("sort", [lambda drafter: drafter, AsNetwork], ids=["text", "network"])
def test_a_least_length_is_kept_where_less_would_pay(sort: Callable[[TextDrafter], Drafter]) -> None:
    chain = chain_of(sort(Says("d", list(range(20)))), slope=0.2)
    slot = slot_with([1], types=("d",))
    short = len(one_draft(chain, slot, 16))
    slot.speculate = resolve_speculate(Settings(), ["d"], Speculate(n_min=7))
    assert 0 < short < 7
    assert len(one_draft(chain, slot, 16)) == 7


def test_a_drafter_that_raises_is_off_for_its_request_and_after_three_for_all() -> None:
    class Raises(Says):
        def guess(self, want: Want) -> Guess:
            super().guess(want)
            raise ValueError("broken")

    broken, sound = Raises("broken", [1]), Says("sound", [2])
    chain = chain_of(broken, sound)
    for slot_id in range(5):
        slot = slot_with([1], types=("broken", "sound"), slot_id=slot_id)
        for _ in range(2):
            assert one_draft(chain, slot).token_ids == (2,)
    assert broken.asked == [0, 1, 2]
    assert chain.guard.disabled == ("broken",)


def test_failures_are_forgotten_in_time() -> None:
    now = [0.0]
    guard = Guard(["broken"], [], lambda: now[0])

    def fail() -> None:
        raise ValueError("broken")

    slot = slot_with([1], types=("broken",))
    for now[0] in (1.0, 500.0, 590.0):
        assert "broken" in guard.serving(slot_with([1], types=("broken",)))
        guard.run("broken", "draft", [slot], fail)
    assert guard.disabled == ("broken",)
    now[0] = 602.0
    assert guard.disabled == ()
    assert "broken" not in guard.serving(slot), "it stays off for a request on which it failed"
    guard.run("broken", "draft", [slot], fail)
    assert guard.disabled == ("broken",), "three within ten minutes again"


@pytest.mark.parametrize(
    "guesses",
    [[], [Guess([1, 2]), Guess([3])], [Guess([1, 2, 3], [0.9])]],
    ids=["none", "too many", "ill-shaped"],
)
def test_guesses_of_a_wrong_shape_are_a_failure_of_their_drafter_alone(guesses: list[Guess]) -> None:
    broken, sound = Says("broken", []), Says("sound", [2])
    broken.draft = lambda wants: guesses  # type: ignore[method-assign]
    slot = slot_with([1], types=("broken", "sound"))
    assert one_draft(chain_of(broken, sound), slot).token_ids == (2,)
    assert slot.drafters == {"sound"}


def test_a_network_is_never_asked_for_more_than_it_can_guess() -> None:
    network = Says("network", list(range(16)), [0.99] * 16)
    drafter = AsNetwork(network)
    drafter.longest = 3
    slot = slot_with([1], types=("network",))
    assert len(one_draft(chain_of(drafter), slot, 16)) == 3
    assert network.lengths == [3]


def test_a_drafter_that_says_more_than_it_was_asked_is_cut() -> None:
    says = Says("d", [1] * 9)
    says.draft = lambda wants: [Guess([1] * 9) for _ in wants]  # type: ignore[method-assign]
    assert len(one_draft(chain_of(says), slot_with([1], types=("d",)), 4)) == 4


def test_a_network_that_is_hardly_ever_right_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    chain = chain_of(Says("copies", [1]), AsNetwork(Says("network", [1])))
    slot = slot_with([1], types=("copies", "network"))
    for name in ("copies", "network"):
        for _ in range(100):
            chain.credit(slot, Draft((1,) * 8, (name,) * 8), 0, Pass(1, 1))
    assert chain.guard.doubtful == ("network",)
    assert [record.message[:15] for record in caplog.records] == ["drafter network"]
    for _ in range(100):
        chain.credit(slot, Draft((1,) * 8, ("network",) * 8), 4, Pass(1, 1))
    assert chain.guard.doubtful == ()
    for _ in range(2000):
        chain.credit(slot, Draft((1,) * 8, ("network",) * 8), 0, Pass(1, 1))
    assert chain.guard.doubtful == ("network",)
    assert len(caplog.records) == 1


def test_figures_are_kept_per_drafter_and_place() -> None:
    chain = chain_of(Says("a", [1]), Says("b", [2]))
    slot = slot_with([1], types=("a", "b"))
    draft = Draft((1, 2, 3, 4), ("a", "a", "b", "b"))
    chain.credit(slot, draft, 3, Pass(1, 1))
    chain.credit(slot, draft, 0, Pass(1, 1))
    chain.credit(slot, Draft(), 0, Pass(1, 1))
    told = {name: tally.count() for name, tally in slot.stats.drafters.items()}
    assert told == {name: tally.count() for name, tally in chain.guard.totals.items()}
    assert (told["a"].n_drafts, told["a"].n_drafts_accepted) == (2, 1)
    assert (told["a"].n_drafted, told["a"].n_accepted, told["a"].accepted_by_position) == (4, 2, (1, 1))
    assert (told["b"].n_drafted, told["b"].n_accepted, told["b"].accepted_by_position) == (4, 1, (0, 0, 1))
    one_draft(chain, slot)
    assert slot.stats.drafters["a"].count().n_draft_calls == 1
    assert slot.stats.drafters["a"].count().draft_s > 0


def test_accepted_guesses_are_not_fed_to_the_draft_network_again() -> None:
    network = ToyNetwork()
    toy = toy_engine(lambda cache: [DraftModel(network, cache, 16, 64)], n_slots=1)  # type: ignore
    toy.engine.add(toy_slot("a", [1, 2, 3], types=("draft-model",), n_max=4, max_tokens=40))
    rows: list[int] = []
    network.spoil = lambda batch, logits: rows.append(len(batch.token_ids))
    toy.engine.step()  # the prompt
    toy.engine.step()
    assert rows[-4:] == [4, 1, 1, 1]  # prompt and first token at once, then one guess a pass
    assert toy.cache.length(0, STORE) == 4 + 3  # three guesses were fed and kept; the fourth was never fed
    toy.engine.step()
    assert rows[-4:] == [2, 1, 1, 1]  # the fourth guess and the target's own token


def test_guesses_that_came_by_another_road_are_kept_but_the_last_token_is_fed_again() -> None:
    """All four guesses and the target's own token come, although only one of them was verified."""
    network = ToyNetwork()
    toy = toy_engine(lambda cache: [], n_slots=1)
    drafter = DraftModel(network, toy.cache, 16, 64)  # type: ignore[arg-type]
    slot = slot_with([1, 2, 3], types=("draft-model",))
    toy.cache.begin(0, slot.tokens, "")
    guess = read(drafter, Want(slot, 4))
    for token_id in guess.token_ids[:3]:
        slot.append(token_id)
    drafter.accept([Kept(slot, Draft(guess.token_ids[:1], ("draft-model",)), 1)])
    assert toy.cache.length(0, STORE) == len(slot.tokens) - 1
    again = read(drafter, Want(slot, 1))
    assert again.token_ids == guess.token_ids[3:]


def fed_of(
    network: ToyNetwork, n_context: int, prompt: list[int], chunk: int = 8
) -> tuple[list[int], Slot, Toy]:
    """Rows of the passes of a draft model's first draft, behind a prompt; the slot; what it runs in."""
    toy = toy_engine(lambda cache: [DraftModel(network, cache, chunk, n_context)], n_slots=1)  # type: ignore
    slot = toy_slot("a", prompt, types=("draft-model",), n_max=1, max_tokens=30)
    toy.engine.add(slot)
    while slot.n_past < len(slot.tokens) - 1:
        toy.engine.step()
    assert network.n_passes == 0, "a prompt is not fed before a draft is asked for"
    (drafter,) = toy.engine._chain._on_device
    n_unfed, rows = drafter.n_unfed(slot), list[int]()
    network.spoil = lambda batch, logits: rows.append(len(batch.token_ids))
    toy.engine.step()
    assert sum(rows) == n_unfed
    return rows, slot, toy


@pytest.mark.parametrize(
    ("n_context", "rows"),
    [(64, [8, 8, 8, 3]), (20, [8, 8, 7]), (16, [8, 8, 3]), (4, [7]), (1, [3])],
)
def test_a_draft_model_is_fed_as_far_back_as_its_context_in_as_few_passes_as_can_be(
    n_context: int, rows: list[int]
) -> None:
    """Of 27 tokens, in pages of four and passes of eight rows."""
    network = ToyNetwork(memory=3)
    found, _, toy = fed_of(network, n_context, [*range(1, 25), 3, 4])
    assert found == rows
    assert toy.cache.start(0, STORE) == 27 - sum(rows)


def test_a_draft_model_that_starts_over_is_right_once_it_has_seen_enough() -> None:
    network = ToyNetwork(memory=3)
    _, slot, toy = fed_of(network, 4, [*range(1, 25), 3, 4])
    toy.target.memory = 3
    while toy.engine.busy:
        toy.engine.step()
    count = slot.stats.drafters["draft-model"].count()
    assert count.n_accepted > 0.9 * count.n_drafted > 8
    assert network.n_passes < 2 * len(slot.tokens)


@pytest.mark.parametrize(("types", "n_max"), [(("draft-model",), 0), ((), 4)])
def test_a_request_without_drafts_costs_the_draft_network_nothing(types: tuple[str, ...], n_max: int) -> None:
    network = ToyNetwork()
    toy = toy_engine(lambda cache: [DraftModel(network, cache, 16, 64)], n_slots=1)  # type: ignore
    prompt = list(range(1, 25))  # several pages: a drafter in use would feed them as they are kept
    toy.engine.add(toy_slot("a", prompt, types=types, n_max=n_max))
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
        (Speculate(types=("ngram-simple", "forced")), ("ngram-simple",), 16),
        (Speculate(types=("none",)), (), 16),
        (Speculate(types=("auto",), n_max=2, n_min=5), ("ngram-simple", "draft-model"), 2),
    ],
)
def test_a_request_narrows_what_the_server_loaded(
    asked: Speculate, types: tuple[str, ...], n_max: int
) -> None:
    resolved = resolve_speculate(Settings(), ("forced", "prediction", "ngram-simple", "draft-model"), asked)
    assert (resolved.types, resolved.n_max) == (types, n_max)
    assert resolved.n_min <= resolved.n_max


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (Speculate(types=("suffix",)), Unsupported),
        (Speculate(n_max=-1), InvalidRequest),
        (Speculate(n_min=-1), InvalidRequest),
        (Speculate(p_min=1.5), InvalidRequest),
        (Speculate(ngram_size_n=0), InvalidRequest),
        (Speculate(ngram_min_hits=1025), InvalidRequest),
        (Speculate(types=("draft-model",), ngram_size_n=3), Unsupported),
    ],
)
def test_what_cannot_be_honoured_is_refused(asked: Speculate, error: type[Exception]) -> None:
    with pytest.raises(error):
        resolve_speculate(Settings(), ("ngram-simple", "draft-model"), asked)


def test_a_predicted_text_is_used_beside_the_types_a_request_names() -> None:
    loaded = ("prediction", "suffix", "draft-model")
    asked = Speculate(types=("suffix",))
    assert resolve_speculate(Settings(), loaded, asked).types == ("suffix",)
    assert resolve_speculate(Settings(), loaded, asked, predicts=True).types == ("prediction", "suffix")
    assert resolve_speculate(Settings(), loaded, Speculate(types=("none",)), predicts=True).types == ()
    with pytest.raises(Unsupported, match="--spec-type none"):
        resolve_speculate(Settings(), (), Speculate(), predicts=True)
