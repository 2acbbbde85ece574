"""What each step of a reply drafted: as it was proposed, adding up to the reply's figures, only where that is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from slipstream.engine.api import Delta, Done, Event
from slipstream.engine.drafting import Step
from slipstream.engine.service.run import event_stream
from slipstream.engine.service.run.event_stream import Stream
from slipstream.engine.slot import N_RECENT, SlotStats
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import NO_DRAFT, Draft, Drafter, Guess, Kept, TextDrafter, Want
from slipstream.engine.stats import SlotState
from tests.unit.doubles import AsNetwork, drafts_of
from tests.unit.test_ahead import PROMPTS, Knowing, known, play
from tests.unit.test_speculate import Says, chain_of
from tests.unit.toy import Toy, Words, toy_engine, toy_slot
from tests.wound_clock import WoundClock


@dataclass
class Seen:
    """What came of requests, by name."""

    deltas: dict[str, list[Delta]] = field(default_factory=lambda: {name: [] for name in PROMPTS})
    ends: dict[str, Done] = field(default_factory=dict)
    slots: list[SlotState] = field(default_factory=list)  # the pictures of those that work

    def steps(self, name: str) -> list[Step]:
        return [step for delta in self.deltas[name] for step in delta.steps]


def run(toy: Toy, *asking: str, types: tuple[str, ...] = (), **options: object) -> Seen:
    """Play the prompts to their ends. asking: those that want to know of their steps."""
    seen = Seen()
    for name, prompt in PROMPTS.items():
        toy.engine.add(toy_slot(name, prompt, types=types, steps=name in asking, **options))  # type: ignore[arg-type]
    while toy.engine.busy:
        for name, event in toy.engine.step():
            _note(seen, name, event)
        seen.slots += [one for one in toy.engine.stats().slots if one.busy]
    return seen


def _note(seen: Seen, name: str, event: Event) -> None:
    if isinstance(event, Delta):
        seen.deltas[name].append(event)
    else:
        assert isinstance(event, Done)
        seen.ends[name] = event


class Half(TextDrafter):
    """Half of the tokens by one name, half by the next: `Knowing` of the text as a text drafter."""

    name = "half"

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._texts = texts

    def guess(self, want: Want) -> Guess:
        return Guess(known(self._texts, want, want.n_tokens)[: 1 + want.n_tokens % 4])


@pytest.fixture(scope="module")
def texts() -> dict[str, list[int]]:
    return play(toy_engine(n_slots=1))[0]


def proposed(texts: dict[str, list[int]], name: str, n_tokens: int) -> tuple[int, ...]:
    """What a drafter that knows the text says behind so many tokens of the sequence."""
    slot = toy_slot(name, [*PROMPTS[name], *texts[name]])
    return tuple(known(texts, Want(slot, 4), n_tokens))


def check(seen: Seen, name: str, texts: dict[str, list[int]]) -> None:
    """The steps of one request against its text, its sources, its figures and what was proposed."""
    n_tokens, end = len(PROMPTS[name]), seen.ends[name]
    for index, delta in enumerate(seen.deltas[name]):
        (step,) = delta.steps
        assert step.index == index
        n_accepted = sum(source is not None for source in delta.sources)
        assert step.n_accepted == n_accepted
        assert step.token_ids[:n_accepted] == delta.token_ids[:n_accepted]
        assert step.token_ids == proposed(texts, name, n_tokens)[: len(step.token_ids)]
        assert step.pieces == tuple(f"w{one} " for one in step.token_ids)
        assert (step.drafter is None) == (not step.token_ids)
        assert len(step.token_ids) <= end.speculation.n_max
        n_tokens += len(delta.token_ids)
    steps = seen.steps(name)
    assert sum(len(step.token_ids) for step in steps) == end.speculation.n_drafted > 0
    assert sum(step.n_accepted for step in steps) == end.speculation.n_accepted > 0
    assert sum(step.n_accepted for step in steps) < end.speculation.n_drafted
    assert len(steps) == end.speculation.n_steps
    deepest = max(len(step.token_ids) for step in steps)
    counts = list(end.speculation.drafters.values())
    drafted = [sum(len(step.token_ids) > i for step in steps) for i in range(deepest)]
    accepted = [sum(step.n_accepted > i for step in steps) for i in range(deepest)]
    for count in counts:
        assert list(count.drafted_by_position) == drafted
        assert [*count.accepted_by_position, *[0] * deepest][:deepest] == accepted


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("drafter", [Knowing, Half])
def test_steps_say_what_was_proposed_and_add_up(
    texts: dict[str, list[int]], drafter: type, overlaps: bool
) -> None:
    """Also where the draft was made on the device, behind a pass that nobody had read."""
    one = drafter(texts)
    toy = toy_engine(lambda cache: [one], n_slots=3, overlaps=overlaps)
    seen = run(toy, *PROMPTS, types=(one.name,))
    for name in PROMPTS:
        check(seen, name, texts)
        assert {step.drafter for step in seen.steps(name)} == {None, one.name}
        assert seen.steps(name)[0].why_not is None, "a prompt could not carry drafts"
    assert not isinstance(one, Knowing) or (one.n_ahead > 5) == overlaps


def test_nothing_is_made_for_requests_that_do_not_ask(
    texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[int]] = []
    guessed = Words.guessed

    def watched(self: Words, before: list[int], token_ids: list[int]) -> tuple[str, ...]:
        asked.append(token_ids)
        return guessed(self, before, token_ids)

    monkeypatch.setattr(Words, "guessed", watched)
    seen = run(toy_engine(lambda cache: [Half(texts)], n_slots=3), "b", types=("half",))
    assert len(asked) == len(seen.steps("b")) > 0
    assert not seen.steps("a")
    assert not seen.steps("c")
    plain = run(toy_engine(lambda cache: [Half(texts)], n_slots=3), types=("half",))
    for name in PROMPTS:
        assert [one.token_ids for one in plain.deltas[name]] == [one.token_ids for one in seen.deltas[name]]


def test_a_cut_end_counts_what_is_kept(texts: dict[str, list[int]]) -> None:
    """A stop string inside an accepted run, and the limit."""
    n_cut = 0
    for at in range(1, 19):
        toy = toy_engine(lambda cache: [Half(texts)], n_slots=1)
        stop = f"w{texts['a'][at]} "
        seen = run(toy, "a", types=("half",), stop=stop)
        deltas, end = seen.deltas["a"], seen.ends["a"]
        assert end.stop_string == stop
        assert sum(one.n_accepted for one in seen.steps("a")) == end.speculation.n_accepted
        assert sum(len(one.token_ids) for one in seen.steps("a")) == end.speculation.n_drafted
        last = deltas[-1]
        assert last.steps[0].n_accepted == sum(one is not None for one in last.sources) <= len(last.token_ids)
        n_cut += last.steps[0].n_accepted == len(last.token_ids)  # the model's own token is behind the end
    assert n_cut > 0


class Twins(TextDrafter):
    """A network's guess that this one knows to go on: drafts of two authors."""

    name = "twins"

    def guess(self, want: Want) -> Guess:
        return Guess([5, 6, 7][: want.n_max], [0.99] * 3) if want.after else Guess()


def test_the_chief_author_of_a_draft() -> None:
    assert NO_DRAFT.author is None
    assert Draft((1, 2, 3), ("a", "b", "b")).author == "b"
    assert Draft((1, 2), ("a", "b")).author == "a"
    network = AsNetwork(Says("network", [1, 2], [0.99] * 2))
    slot = toy_slot("r", [1], types=("twins", "network"), n_max=8)
    (draft,) = drafts_of(chain_of(Twins(), network, slope=0.001), [Want(slot, 8)], Pass(1, 1))
    assert (draft.sources, draft.author) == (("network", "network", "twins", "twins", "twins"), "twins")


class Fails(TextDrafter):
    name = "text"

    def guess(self, want: Want) -> Guess:
        raise RuntimeError("broken")


def reasons(
    drafters: Sequence[Drafter], *, slope: float = 0.02, n: int = 1, dear: float = 0.0
) -> list[str | None]:
    """Why nothing was drafted in n passes for a slot beside another that does not ask, of those without a draft.

    dear: seconds that each draft is believed to cost.
    """
    chain = chain_of(*drafters, slope=slope)
    if dear:
        chain.lengths.costs.draft_s = lambda *given: dear  # type: ignore[method-assign]
    types = tuple(one.name for one in drafters)
    slots = [toy_slot("r", [1], slot_id=i, types=types, n_max=8, steps=i == 0) for i in range(2)]
    for slot in slots:
        chain.begin(slot)
    told = []
    for _ in range(n):
        asking, silent = drafts_of(chain, [Want(slot, 8) for slot in slots], Pass(2, 2))
        assert silent.why_not is None
        assert asking.why_not is None or not asking
        if not asking:
            told.append(asking.why_not)
        for slot in slots:
            slot.append(1)
        chain.accept([Kept(slot, Draft(), 0) for slot in slots])
    return told


def wrong_network() -> AsNetwork:
    return AsNetwork(Says("network", [9, 9, 9, 9]))


def test_why_nothing_is_drafted_for_a_slot() -> None:
    assert reasons([Says("text", [])]) == ["no_guess"]
    assert reasons([Says("text", [5, 5], [0.3] * 2)], slope=1.0) == ["rows_too_dear"]
    assert reasons([Fails()], n=3) == ["no_guess", "switched_off", "switched_off"]
    assert {*reasons([Says("text", [])], n=300, dear=0.5)} == {"no_guess", "not_worth_asking"}
    for others in ([], [Says("text", [])]):  # weighed and refused, tried, or resting
        told = reasons([*others, wrong_network()], n=300, dear=0.1)
        assert {*told} == {"network_too_slow"}
        assert len(told) > 200


class ForOne(TextDrafter):
    """Has a guess for one slot, and a sure one for another."""

    name = "text"

    def guess(self, want: Want) -> Guess:
        return {0: Guess(), 1: Guess([5], [0.01]), 2: Guess([5], [0.99])}[want.slot.id]


def test_each_slot_has_its_own_reason() -> None:
    chain = chain_of(ForOne(), slope=0.3)
    slots = [toy_slot("r", [1], slot_id=i, types=("text",), n_max=8, steps=True) for i in range(3)]
    for n_slots in (3, 1, 3):  # what was noted of one pass is not said of the next
        wants = [Want(slot, 8) for slot in slots[:n_slots]]
        drafts = drafts_of(chain, wants, Pass(n_slots, n_slots))
        assert [one.why_not for one in drafts] == ["no_guess", "rows_too_dear", None][:n_slots]
    assert drafts[2].token_ids == (5,)


def test_requests_that_never_draft_say_so() -> None:
    """In every step, the prompt's too."""
    drafting = toy_engine(lambda cache: [Says("text", [1])], n_slots=3)
    for name, prompt in PROMPTS.items():
        drafting.engine.add(toy_slot(name, prompt, types=("text",), n_max=0, steps=True))
    seen = Seen()
    while drafting.engine.busy:
        for name, event in drafting.engine.step():
            _note(seen, name, event)
    assert {step.why_not for name in PROMPTS for step in seen.steps(name)} == {"not_asked_for"}
    plain = run(toy_engine(n_slots=3), *PROMPTS)
    assert {step.why_not for name in PROMPTS for step in plain.steps(name)} == {"no_drafter"}
    assert all(one.n_max == 0 and one.drafter is None for one in plain.slots)


def test_joined_deltas_keep_all_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_MOST_WAITING", 2)
    stream = Stream([], "", finish=lambda: None, cancel=lambda: None)
    for i in range(5):
        stream.push(Delta("x", (i,), (None,), ("x",), (), (Step(i),)))
    assert [[step.index for step in one.steps] for one in stream._events] == [[0], [1, 2, 3, 4]]  # type: ignore[union-attr]


def test_slots_show_their_last_steps(texts: dict[str, list[int]]) -> None:
    toy = toy_engine(lambda cache: [Half(texts)], n_slots=3)
    seen = run(toy, *PROMPTS, types=("half",))
    assert seen.slots
    for one in seen.slots:
        assert one.request_id is not None
        steps = seen.steps(one.request_id)[: len(one.recent)]
        assert one.recent == tuple((len(step.token_ids), step.n_accepted) for step in steps)
        assert one.drafter == ("half" if any(step.token_ids for step in steps) else None)
        assert one.n_max == 4
    assert max(len(one.recent) for one in seen.slots) > 3
    assert all(not slot.recent and slot.drafter is None for slot in toy.engine.stats().slots), "they are idle"


def test_so_many_steps_are_remembered() -> None:
    stats = SlotStats()
    for i in range(N_RECENT + 6):
        stats.step(i, 0, None if i else "a")
    assert list(stats.recent) == [(i, 0) for i in range(6, N_RECENT + 6)]
    assert (stats.n_steps, stats.drafter) == (N_RECENT + 6, "a")


class Slow(Half):
    """Takes a second for each guess."""

    clock: WoundClock
    n_asked = 0

    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        self.n_asked += 1
        self.clock.wind(1.0)
        return super().draft(wants)


def test_a_replys_time_is_split(texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess takes 1 s, a pass 100 s, the text of a token 10,000 s."""
    clock = WoundClock(tick=1e-6)
    drafter = Slow(texts)
    drafter.clock = clock
    toy = toy_engine(lambda cache: [drafter], n_slots=1, now=clock)
    monkeypatch.setattr(toy.target, "spoil", lambda batch, logits: clock.wind(100.0))
    push = Words.push

    def slowly(self: Words, token_id: int, *, may_stop: bool = True) -> str:
        clock.wind(10_000.0)
        return push(self, token_id, may_stop=may_stop)

    monkeypatch.setattr(Words, "push", slowly)
    toy.engine.add(toy_slot("a", PROMPTS["a"], types=("half",)))
    events = [event for _ in range(30) if toy.engine.busy for _, event in toy.engine.step()]
    *deltas, end = events
    assert isinstance(end, Done)
    kept = [len(one.token_ids) for one in deltas if isinstance(one, Delta)]
    n_later = len(kept) - 1
    times = end.timings
    assert times.draft_s == pytest.approx(drafter.n_asked, abs=0.01)
    assert times.verify_s == pytest.approx(100 * n_later, abs=0.01)
    # The last tokens' time is that of their pass.
    others_s = 10_000 * sum(kept[:-1])
    assert times.generation_s == pytest.approx(others_s + 100 * n_later + drafter.n_asked, abs=0.01)


def test_one_token_takes_no_time() -> None:
    for end in run(toy_engine(n_slots=1), max_tokens=1).ends.values():
        assert (end.timings.generation_s, end.timings.draft_s, end.timings.verify_s) == (0.0, 0.0, 0.0)
