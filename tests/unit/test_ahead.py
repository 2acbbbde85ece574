"""Passes launched behind a pass that nobody has read: the same text, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Delta, Done, Event, Failed
from slipstream.engine.batch import Batch, Download, Span
from slipstream.engine.core.engine import Engine
from slipstream.engine.slot import Slot
from slipstream.engine.speculate import tails
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.survival import Survival
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import (
    DeviceDrafter,
    Draft,
    Drafts,
    Guess,
    Guesses,
    TextDrafter,
    Want,
)
from slipstream.engine.speculate.tails import Tails
from slipstream.kernels import select
from tests.unit.toy import CPU, VOCAB, Toy, toy_engine, toy_slot
from tests.wound_clock import DeviceClock

PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8], "c": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}
N_TOKENS = 20


def known(texts: dict[str, list[int]], want: Want, n_tokens: int) -> list[int]:
    """How the text goes on behind so many tokens, wrong at every third position."""
    whole = [*PROMPTS[want.slot.request.id], *texts[want.slot.request.id], *[0] * 20]
    return [
        (token_id + (i % 3 == 0)) % VOCAB
        for i, token_id in enumerate(whole[: n_tokens + want.n_max])
        if i >= n_tokens
    ]


class Made:
    """Guesses of `Knowing`, that count in it whether they were read where they begin."""

    def __init__(self, drafter: Knowing, wants: Sequence[Want], ends: Sequence[int]) -> None:
        self._drafter, self._wants, self._ends = drafter, wants, list(ends)
        self._made = [known(drafter.texts, want, end) for want, end in zip(wants, ends, strict=True)]

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([token_id for one in self._made for token_id in one])

    def read(self) -> list[Guess]:
        self._drafter.n_read += 1
        self._drafter.n_astray += [len(want.slot.tokens) for want in self._wants] != self._ends
        return [Guess(one) for one in self._made]


class Knowing(DeviceDrafter):
    """Stands for a network: knows the text, but for every third position of it."""

    name = "knowing"

    def __init__(self, texts: dict[str, list[int]], *, goes_ahead: bool = True) -> None:
        self.texts = texts
        self._goes_ahead = goes_ahead
        self.n_made = self.n_ahead = self.n_read = self.n_declined = 0
        self.n_astray = 0  # reads where the text did not end where the guesses begin

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        if tails is not None and not self._goes_ahead:
            self.n_declined += 1
            return None
        self.n_made += 1
        self.n_ahead += tails is not None
        n_lost = [0] * len(wants) if tails is None else tails.n_lost.tolist()
        return Made(self, wants, [want.n_tokens - lost for want, lost in zip(wants, n_lost, strict=True)])


@pytest.fixture(autouse=True)
def no_pass_fails(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A pass that fails is run again, so its error shows in the log alone."""
    yield
    if request.function is not test_a_pass_that_breaks_off_is_run_again:
        assert not [one for one in caplog.get_records("call") if "request failed" not in one.message]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return play(toy_engine(n_slots=1))[0]


def play(
    toy: Toy, *, types: tuple[str, ...] = (), between: Callable[[Toy], None] = lambda toy: None
) -> tuple[dict[str, list[int]], dict[str, Event]]:
    """Play the prompts to their ends: tokens and last event of each. between: called after every step."""
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    last: dict[str, Event] = {}
    for name, prompt in PROMPTS.items():
        toy.engine.add(toy_slot(name, prompt, types=types))
    for _ in range(500):
        if not toy.engine.busy:
            break
        for name, event in toy.engine.step():
            if isinstance(event, Delta):
                tokens[name] += event.token_ids
            else:
                last[name] = event
        between(toy)
    assert not toy.engine.busy
    assert toy.engine.stats().n_pages_held == 0
    return tokens, last


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Per step, whether a pass was launched ahead."""
    seen: list[bool] = []
    step = Engine.step

    def watched(self: Engine) -> list[tuple[str, Event]]:
        n_steps = self.stats().n_steps
        events = step(self)
        if self.capacity.overlaps and self.stats().n_steps > n_steps:
            seen.append(self._flight is not None)
        return events

    monkeypatch.setattr(Engine, "step", watched)
    return seen


@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_plain_text_is_the_same_and_nearly_all_passes_are_launched_ahead(
    expected: dict[str, list[int]], flights: list[bool], n_slots: int
) -> None:
    toy, read_first = (toy_engine(n_slots=n_slots, overlaps=overlaps) for overlaps in (True, False))
    tokens, last = play(toy)
    assert tokens == play(read_first)[0] == expected
    assert all(isinstance(one, Done) for one in last.values())
    assert flights.count(False) <= 3
    if n_slots == 1:  # where a text is at its limit is known before
        assert toy.target.n_passes == read_first.target.n_passes


@pytest.mark.parametrize("n_slots", [1, 3])
def test_drafts_made_on_the_device_are_the_drafts_of_the_host(
    expected: dict[str, list[int]], flights: list[bool], n_slots: int
) -> None:
    there, here = Knowing(expected), Knowing(expected)
    hosted = toy_engine(lambda cache: [here], n_slots=n_slots)
    toy = toy_engine(lambda cache: [there], n_slots=n_slots, overlaps=True)
    assert play(hosted, types=("knowing",))[0] == play(toy, types=("knowing",))[0] == expected
    assert there.n_ahead > 5
    assert there.n_astray == 0
    assert there.n_read == there.n_made
    assert sum(flights) > 5
    by_host, by_device = (
        one.engine.stats().drafters["knowing"].accepted_by_position for one in (hosted, toy)
    )
    # Drafts are shorter at a text's end, of which the running pass might keep more than it does.
    assert sum(by_device) > 0.85 * sum(by_host)


def test_a_draft_is_credited_at_the_price_of_the_pass_that_verifies_it(
    expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pass has been drafted for by then, and may hold more slots."""
    weighed: dict[tuple[str, int], Pass] = {}  # by request and tokens before the draft
    draft, credit = Chain.draft, Chain.credit
    n_other = 0

    def drafted(
        self: Chain, wants: Sequence[Want], coming: Pass, tails: Tails | None = None
    ) -> Drafts | None:
        made = draft(self, wants, coming, tails)
        for want in wants if made is not None else ():
            lost = 0 if tails is None else int(tails.of_slots([want.slot.id]).n_lost)
            weighed[want.slot.request.id, want.n_tokens - lost] = coming
        latest.append(coming)
        return made

    def credited(self: Chain, slot: Slot, one: Draft, n_accepted: int, coming: Pass) -> None:
        nonlocal n_other
        assert not one or coming == weighed[slot.request.id, len(slot.tokens) - n_accepted - 1]
        n_other += bool(one) and coming != latest[-1]
        credit(self, slot, one, n_accepted, coming)

    latest: list[Pass] = []
    monkeypatch.setattr(Chain, "draft", drafted)
    monkeypatch.setattr(Chain, "credit", credited)
    play(toy_engine(lambda cache: [Knowing(expected)], n_slots=3, overlaps=True), types=("knowing",))
    assert n_other > 0


def test_a_pass_that_is_not_run_for_want_of_pages_leaves_its_drafter_nothing_unread(
    expected: dict[str, list[int]],
) -> None:
    drafter = Knowing(expected)
    toy = toy_engine(lambda cache: [drafter], n_slots=3, n_pages=14, overlaps=True)
    assert play(toy, types=("knowing",))[0] == expected
    assert drafter.n_ahead > 0
    assert (drafter.n_read, drafter.n_astray) == (drafter.n_made, 0)


class Copying(TextDrafter):
    """Knows how a text goes on where a word of its own has just been written."""

    name = "copying"

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._texts = texts

    def guess(self, want: Want) -> Guess:
        return Guess(known(self._texts, want, want.n_tokens) if want.slot.tokens[-1] % 4 == 0 else ())


def test_what_a_token_just_picked_tells_is_not_lost(expected: dict[str, list[int]]) -> None:
    """It is worth more than a pass that is launched without it."""
    hosted, toy = (
        toy_engine(lambda cache: [Copying(expected)], n_slots=1, overlaps=overlaps)
        for overlaps in (False, True)
    )
    assert play(hosted, types=("copying",))[0] == play(toy, types=("copying",))[0] == expected
    by_host, by_device = (
        sum(one.engine.stats().drafters["copying"].accepted_by_position) for one in (hosted, toy)
    )
    # The last token but one of a text is not drafted behind a pass: that might be the last of it.
    assert by_device >= by_host - len(PROMPTS)
    assert by_host > 2 * len(PROMPTS)


def test_a_drafter_that_never_knows_a_thing_is_not_waited_for_forever(
    expected: dict[str, list[int]], flights: list[bool]
) -> None:
    drafter = Copying({name: [] for name in expected})
    toy = toy_engine(lambda cache: [drafter], n_slots=1, overlaps=True)
    for _ in range(6):
        assert play(toy, types=("copying",))[0] == expected
        once, flights[:] = sum(flights), []
    assert once > 40


class Slow(Knowing):
    """Takes half a pass a position."""

    def __init__(self, texts: dict[str, list[int]], clock: DeviceClock, *, goes_ahead: bool) -> None:
        super().__init__(texts, goes_ahead=goes_ahead)
        self._clock = clock

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        made = super().draft(wants, tails)
        if made is not None:
            self._clock.launch(0.5 * max(want.n_max for want in wants))
        if tails is None:
            self._clock.wait()
        return made


@pytest.mark.parametrize("goes_ahead", [True, False])
def test_a_slow_network_that_is_always_wrong_is_hardly_asked_though_nobody_waits_for_its_drafts(
    expected: dict[str, list[int]], goes_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = DeviceClock(monkeypatch)
    drafter = Slow({name: [] for name in expected}, clock, goes_ahead=goes_ahead)
    toy = toy_engine(lambda cache: [drafter], n_slots=1, overlaps=True, adaptive=True, now=clock)
    toy.target.spoil = lambda batch, logits: clock.wind(1.0 + 0.02 * len(batch.token_ids))
    toy.engine.warm_up()
    toy.target.spoil = lambda batch, logits: clock.launch(1.0 + 0.02 * len(batch.token_ids))
    n_warm = toy.target.n_passes
    for _ in range(4):
        assert play(toy, types=("knowing",))[0] == expected
    assert 0 < drafter.n_made < 0.1 * (toy.target.n_passes - n_warm)
    assert (drafter.n_ahead > 0) == goes_ahead
    # Whatever is put off until the pass has been read takes place then.
    assert drafter.n_declined <= drafter.n_made


def test_a_network_that_needs_the_host_gets_it(expected: dict[str, list[int]], flights: list[bool]) -> None:
    drafter = Knowing(expected, goes_ahead=False)
    tokens, _ = play(toy_engine(lambda cache: [drafter], overlaps=True), types=("knowing",))
    assert tokens == expected
    assert sum(flights) < len(flights) / 2


def test_a_draft_that_cannot_be_read_is_none(
    expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Made) -> list[Guess]:
        raise ValueError("no guesses")

    monkeypatch.setattr(Made, "read", broken)
    drafter = Knowing(expected)
    toy = toy_engine(lambda cache: [drafter], overlaps=True)
    assert play(toy, types=("knowing",))[0] == expected
    assert drafter.n_ahead > 0
    assert toy.engine.stats().drafters["knowing"].n_drafted == 0
    caplog.clear()


def test_a_device_that_keeps_other_tokens_than_the_host_changes_nothing(
    expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = tails.verify

    def generous(*args: Tensor) -> tuple[Tensor, Tensor]:
        n_accepted, next_ids = honest(*args)
        return (n_accepted + 1).clamp(max=3), next_ids

    monkeypatch.setattr(tails, "verify", generous)
    toy = toy_engine(lambda cache: [Knowing(expected)], n_slots=2, overlaps=True)
    assert play(toy, types=("knowing",))[0] == expected


def test_a_cancelled_request_leaves_the_others_alone(expected: dict[str, list[int]]) -> None:
    toy = toy_engine(n_slots=3, overlaps=True)

    def cancel(toy: Toy) -> None:
        if any(slot.request.id == "b" and slot.n_decoded > 4 for slot in toy.engine.seats.running):
            toy.engine.cancel("b")

    tokens, last = play(toy, between=cancel)
    assert (tokens["a"], tokens["c"]) == (expected["a"], expected["c"])
    assert "b" not in last


def test_a_guess_for_a_request_that_is_over_is_not_held_against_the_next_in_its_slot(
    expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be, and no guess for the next would, once that text is as long."""
    judged: set[str] = set()
    judge = Survival.judge

    def watched(self: Survival, name: str, slot: Slot, *rest: Any) -> None:
        judged.add(slot.request.id)
        judge(self, name, slot, *rest)

    monkeypatch.setattr(Survival, "judge", watched)
    toy = toy_engine(lambda cache: [Knowing(expected)], n_slots=1, overlaps=True)
    words = expected["c"][15:]
    stop = next(one for one in words if one not in expected["c"][:15])
    toy.engine.add(toy_slot("c", PROMPTS["c"], types=("knowing",), stop=f"w{stop} "))
    toy.engine.add(toy_slot("b", PROMPTS["b"], types=("knowing",)))
    while toy.engine.busy:
        toy.engine.step()
    assert judged == {"b", "c"}


def test_short_of_pages_slots_are_preempted_and_go_on(expected: dict[str, list[int]]) -> None:
    toy = toy_engine(lambda cache: [Knowing(expected)], n_slots=3, n_pages=14, overlaps=True)
    assert play(toy, types=("knowing",))[0] == expected
    assert toy.engine.stats().n_preempted > 0


@pytest.mark.parametrize("types", [(), ("knowing",)])
def test_a_pass_that_breaks_off_is_run_again(expected: dict[str, list[int]], types: tuple[str, ...]) -> None:
    toy = toy_engine(lambda cache: [Knowing(expected)], overlaps=True)

    def sometimes(batch: Batch, logits: Tensor) -> None:
        if toy.target.n_passes % 4 == 3:
            raise RuntimeError("broken")

    toy.target.spoil = sometimes
    assert play(toy, types=types)[0] == expected


@pytest.mark.parametrize("types", [(), ("knowing",)])
def test_a_row_without_numbers_ends_its_request_alone(
    expected: dict[str, list[int]], types: tuple[str, ...]
) -> None:
    def spoil(batch: Batch, logits: Tensor) -> None:
        far = (
            batch.positions[batch.logit_index] == len(PROMPTS["b"]) + 8
        )  # "b" gets there first, and then is gone
        logits[far & torch.tensor([_owner(batch, int(i)) == slot_of["b"] for i in batch.logit_index])] = (
            float("nan")
        )

    toy = toy_engine(lambda cache: [Knowing(expected)], n_slots=3, overlaps=True)
    slot_of = {"b": 1}
    toy.target.spoil = spoil
    tokens, last = play(toy, types=types)
    assert isinstance(last["b"], Failed)
    assert tokens["b"] == expected["b"][:9]
    assert (tokens["a"], tokens["c"]) == (expected["a"], expected["c"])


def _owner(batch: Batch, row: int) -> int:
    return batch.spans[int(torch.searchsorted(batch.span_starts, row, right=True)) - 1].slot


def test_a_pass_of_none_but_ended_requests_is_forgotten(expected: dict[str, list[int]]) -> None:
    toy = toy_engine(n_slots=1, overlaps=True)
    assert play(toy)[0] == expected
    assert play(toy)[0] == expected


def test_tails_are_what_the_host_would_keep() -> None:
    select(CPU, torch.float32)
    token_ids = torch.tensor(
        [5, 6, 7, 8, 1, 2, 3]
    )  # slot 4: 5 and drafts 6 7 8; slot 2: 2 behind a known 1; then 3
    rows = {4: range(4), 2: range(5, 6), 0: range(6, 7)}
    picks = torch.tensor([6, 7, 9, 0, 11, -1])
    ends = Tails(rows, token_ids, picks)
    assert ends.last.tolist() == [[7, 9], [2, 11], [3, 0]]
    assert ends.n_lost.tolist() == [1, 0, 0]
    two = ends.of_slots([2, 4])
    assert (two.last.tolist(), two.n_lost.tolist()) == ([[2, 11], [7, 9]], [0, 1])
    assert ends.picks_of(2).tolist() == [11]
    # A guess that is none is kept by nobody, although its row had to have a token.
    none = Tails({0: range(2)}, torch.tensor([5, 0]), torch.tensor([0, 3]), drafts=torch.tensor([-1]))
    assert (none.last.tolist(), none.n_lost.tolist()) == ([[5, 0]], [1])


def test_what_was_sent_to_the_host_is_as_it_was_then() -> None:
    values = torch.tensor([1, 2])
    sent = Download(values)
    values.zero_()  # as the replay of a captured pass does it
    assert sent.read().tolist() == [1, 2]


def test_a_batch_moved_back_is_the_batch_of_the_earlier_places() -> None:
    tables = [[3, 1, 4, 15], [9, 2, 6, 5]]
    late, early = (
        Batch.build([Span(0, (7, 8, 9), 9 - one, 2, 3), Span(1, (5,), 4 - other, 0, 1)], tables, 4, CPU)
        for one, other in ((0, 0), (3, 1))
    )
    late.move_back(torch.tensor([3, 1]), 4)
    for name, part in early.parts.items():
        assert torch.equal(late.parts[name], part), name
