"""The step loop over a toy network: batching, endings, preemption, and every fault contained in its request."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Delta, Done, Event, Failed
from slipstream.engine.batch import Batch
from slipstream.engine.cache import saved
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.store import Store
from slipstream.engine.errors import StepFailed
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.speculate.bench.garbage import Garbage
from slipstream.engine.speculate.decide.cost import WIDTHS
from slipstream.engine.speculate.drafter import NO_DRAFT, Drafter, Guess, Kept, TextDrafter, Want
from slipstream.engine.speculate.network.draft_model import DraftModel
from tests.unit.doubles import AsNetwork, Faulty
from tests.unit.toy import VOCAB, Toy, ToyNetwork, toy_engine, toy_slot

PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8], "c": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}


def run(
    toy: Toy, prompts: dict[str, list[int]] = PROMPTS, *, types: tuple[str, ...] = (), **options: object
) -> tuple[dict[str, list[int]], dict[str, Event]]:
    """Play requests to their ends: tokens and last event of each."""
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    last: dict[str, Event] = {}
    for name, prompt in prompts.items():
        toy.engine.add(toy_slot(name, prompt, types=types, **options))  # type: ignore[arg-type]
    for _ in range(2000):
        if not toy.engine.busy:
            break
        for name, event in toy.engine.step():
            assert name not in last, "an event after the last one"
            if isinstance(event, Delta):
                tokens[name] += event.token_ids
            else:
                last[name] = event
    assert set(last) == set(prompts)
    stats = toy.engine.stats()
    assert stats.n_pages_held == 0
    assert not any(slot.busy for slot in stats.slots)
    return tokens, last


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return run(toy_engine(n_slots=1))[0]


def test_requests_beside_each_other_get_the_same_tokens(expected: dict[str, list[int]]) -> None:
    tokens, last = run(toy_engine(n_slots=3))
    assert tokens == expected
    done = last["a"]
    assert isinstance(done, Done)
    assert done.reason == "length"
    assert done.usage.n_completion == len(tokens["a"]) == 20


def test_draft_model_that_agrees_saves_passes(expected: dict[str, list[int]]) -> None:
    draft = ToyNetwork()
    toy = toy_engine(lambda cache: [DraftModel(draft, cache, 16, 64)])  # type: ignore[arg-type,list-item]
    tokens, last = run(toy, types=("draft-model",))
    assert tokens == expected
    done = last["a"]
    assert isinstance(done, Done)
    assert done.speculation.n_accepted == done.speculation.n_drafted > 0
    assert done.speculation.n_steps == sum(done.speculation.histogram) < 20 / 3


class Watched(ToyNetwork):
    """Remembers the sequences that its rows have read from the cache."""

    def _logits(self, tokens: np.ndarray) -> np.ndarray:
        self.__dict__.setdefault("seen", []).append(tokens.tolist())
        return super()._logits(tokens)


def test_a_draft_model_never_goes_on_from_what_was_rejected() -> None:
    """Not even where another drafter's longer guess was kept in place of its own."""
    draft = Watched()
    toy = toy_engine(n_slots=1)
    drafter = DraftModel(draft, toy.cache, 16, 64)  # type: ignore[arg-type]
    slot = toy_slot("a", [*PROMPTS["a"]], types=("draft-model",))
    toy.cache.begin(0, slot.tokens, "")
    drafter.begin(slot)
    for _ in range(5):
        guesses = drafter.draft([Want(slot, 4)])
        assert guesses is not None
        (guess,) = guesses.read()
        draft.__dict__["seen"].clear()
        for token_id in [guess.token_ids[0], *[VOCAB - 1 - one for one in guess.token_ids[1:]], 3]:
            slot.append(token_id)
        drafter.accept([Kept(slot, NO_DRAFT, 0)])
        drafter.draft([Want(slot, 4)])
        assert draft.__dict__["seen"]
        assert all(one[: len(slot.tokens)] == slot.tokens for one in draft.__dict__["seen"])


@pytest.mark.parametrize("n_pages", [12, 14])
def test_preempted_requests_continue_identically(expected: dict[str, list[int]], n_pages: int) -> None:
    draft = ToyNetwork(agreement=0.7)
    toy = toy_engine(lambda cache: [DraftModel(draft, cache, 16, 64)], n_slots=3, n_pages=n_pages)  # type: ignore
    tokens, _ = run(toy, types=("draft-model",))
    assert toy.engine.stats().n_preempted > 0
    assert tokens == expected


def test_an_end_token_inside_an_accepted_run_cuts_everything_there(expected: dict[str, list[int]]) -> None:
    eos = expected["a"][9]
    cut = expected["a"].index(eos) + 1
    toy = toy_engine(lambda cache: [DraftModel(ToyNetwork(), cache, 16, 64)], eos=eos)  # type: ignore[arg-type,list-item]
    tokens, last = run(toy, {"a": PROMPTS["a"]}, types=("draft-model",), n_max=15)
    assert tokens["a"] == expected["a"][:cut]
    done = last["a"]
    assert isinstance(done, Done)
    assert (done.reason, done.stop_string, done.usage.n_completion) == ("stop", None, cut)


def test_a_stop_string_ends_the_request_at_its_token(expected: dict[str, list[int]]) -> None:
    word = f"w{expected['b'][5]} "
    cut = expected["b"].index(expected["b"][5]) + 1
    toy = toy_engine(lambda cache: [DraftModel(ToyNetwork(), cache, 16, 64)])  # type: ignore[arg-type,list-item]
    tokens, last = run(toy, {"b": PROMPTS["b"]}, types=("draft-model",), stop=word)
    assert tokens["b"] == expected["b"][:cut]
    done = last["b"]
    assert isinstance(done, Done)
    assert done.stop_string == word


def test_a_stop_string_does_not_end_what_is_too_short(expected: dict[str, list[int]]) -> None:
    """Within the fewest tokens it is text; the first behind them may end the reply."""
    tokens = expected["a"]
    at = 6
    word = f"w{tokens[at]} "
    assert tokens[at] not in tokens[:at] + tokens[at + 1 :]
    for fewest, n in ((at, at + 1), (at + 1, len(tokens))):
        found, _ = run(toy_engine(), {"a": PROMPTS["a"]}, stop=word, min_tokens=fewest)
        assert found["a"] == tokens[:n]


def test_of_preempted_requests_the_oldest_returns_first() -> None:
    """Or requests that keep coming would hold it up for ever."""
    toy = toy_engine(n_slots=3, n_pages=40)
    for name, prompt in PROMPTS.items():
        toy.engine.add(toy_slot(name, prompt))
    toy.engine.step()
    seats = toy.engine.seats
    oldest, *_ = list(seats.running)
    for slot in reversed(list(seats.running)):
        seats._preempt(slot)
    assert seats.preempted[0] is oldest
    seats.fill()
    assert [one.request.id for one in seats.running] == list(PROMPTS)


@pytest.mark.parametrize(("is_evicted", "n_cached"), [(False, 8), (True, 0)])
def test_a_prompt_that_is_interrupted_counts_as_cached_what_its_request_never_computed(
    n_cached: int, *, is_evicted: bool
) -> None:
    prompt = [*range(1, 31)]
    toy = toy_engine(n_slots=1, batch_size=8)
    run(toy, {"first": prompt[:9]})
    toy.engine.add(toy_slot("a", prompt))
    toy.engine.step()
    seats = toy.engine.seats
    (slot,) = seats.running
    assert (slot.stats.n_cached, slot.n_past) == (8, 16)
    seats._preempt(slot)
    if is_evicted:
        saved.erase(toy.cache, prompt, "")
    seats.fill()
    assert slot.n_past == (0 if is_evicted else 16)
    ((_, done),) = [one for _ in range(40) for one in toy.engine.step() if isinstance(one[1], Done)]
    assert isinstance(done, Done)
    assert done.usage.n_cached == n_cached


def test_no_draft_goes_past_the_limit() -> None:
    seen: list[int] = []

    class Eager(TextDrafter):
        name = "eager"

        def guess(self, want: Want) -> Guess:
            seen.append(want.slot.n_limit - len(want.slot.tokens) - want.n_max)
            return Guess([0] * want.n_max)

    run(toy_engine(lambda cache: [Eager()]), types=("eager",))
    assert min(seen) == 1  # the pass's own token still fits


@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_a_hundred_passes_of_drafts_that_are_all_rejected_or_all_accepted(agreement: float) -> None:
    """The text is that of plain decoding either way."""
    plain = run(toy_engine(), {"a": PROMPTS["a"]}, max_tokens=120)[0]

    def drafters(cache: Cache) -> list[Drafter]:
        return [DraftModel(ToyNetwork(agreement=agreement), cache, 16, 64)]  # type: ignore[arg-type]

    tokens, last = run(toy_engine(drafters), {"a": PROMPTS["a"]}, types=("draft-model",), max_tokens=120)
    assert tokens == plain
    done = last["a"]
    assert isinstance(done, Done)
    count = done.speculation.drafters["draft-model"]
    if agreement:
        assert count.n_accepted == count.n_drafted > 90
    else:
        assert count.n_accepted < 0.1 * count.n_drafted
        assert done.speculation.n_steps > 100


def test_cancel_frees_the_slot_and_nobody_else_notices(expected: dict[str, list[int]]) -> None:
    toy = toy_engine(n_slots=2)
    toy.engine.add(toy_slot("gone", [5, 5, 5], max_tokens=200))
    toy.engine.add(toy_slot("queued", [5], max_tokens=200))
    toy.engine.step()
    toy.engine.cancel("gone")
    toy.engine.cancel("queued")
    assert not toy.engine.busy
    assert run(toy)[0] == expected


@pytest.mark.parametrize("verb", ["begin", "draft", "accept", "end"])
def test_a_failing_drafter_costs_nothing_but_speed(verb: str, expected: dict[str, list[int]]) -> None:
    faulty = Faulty(verb)
    toy = toy_engine(lambda cache: [AsNetwork(faulty), Garbage(VOCAB)], n_slots=1)
    tokens, last = run(toy, types=("faulty", "garbage"))
    assert tokens == expected
    done = last["c"]
    assert isinstance(done, Done)
    assert done.speculation.drafters["garbage"].n_drafted > 0  # the next drafter took over
    assert toy.engine.stats().disabled_drafters == ("faulty",)  # three requests failed on it
    assert faulty.n_calls == 3
    run(toy, types=("faulty",))
    assert faulty.n_calls == 3


def _nan_for(length: int) -> Callable[[Batch, Tensor], None]:
    def spoil(batch: Batch, logits: Tensor) -> None:
        for i, row in enumerate(batch.logit_index.tolist()):
            if int(batch.positions[row]) == length - 1:
                logits[i] = torch.nan

    return spoil


def test_nan_ends_that_request_alone(expected: dict[str, list[int]]) -> None:
    toy = toy_engine(n_slots=3)
    toy.target.spoil = _nan_for(len(PROMPTS["c"]) + 18)  # only the longest prompt gets that far
    tokens, last = run(toy)
    assert isinstance(last["c"], Failed)
    assert tokens["c"] == expected["c"][:18]
    assert tokens["a"] == expected["a"]
    assert tokens["b"] == expected["b"]


def test_a_pass_that_fails_with_drafts_is_run_without(expected: dict[str, list[int]]) -> None:
    def refuse_drafts(batch: Batch, logits: Tensor) -> None:
        if any(span.n_drafts for span in batch.spans):
            raise RuntimeError("no drafts today")

    toy = toy_engine(lambda cache: [Garbage(VOCAB)])
    toy.target.spoil = refuse_drafts
    tokens, last = run(toy, types=("garbage",))
    assert tokens == expected
    assert all(isinstance(event, Done) for event in last.values())


def test_a_span_that_fails_alone_fails_its_request_alone(expected: dict[str, list[int]]) -> None:
    def refuse_b(batch: Batch, logits: Tensor) -> None:
        for span in batch.spans:
            if span.n_past == 0 and span.token_ids[0] == PROMPTS["b"][0]:
                raise ValueError("not this prompt")

    toy = toy_engine(n_slots=3)
    toy.target.spoil = refuse_b
    tokens, last = run(toy)
    failed = last["b"]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StepFailed)
    assert (tokens["a"], tokens["c"]) == (expected["a"], expected["c"])


def test_out_of_memory_ends_the_largest_span_and_the_rest_goes_on(expected: dict[str, list[int]]) -> None:
    def small_device(batch: Batch, logits: Tensor) -> None:
        if max(len(span.token_ids) for span in batch.spans) > 8:
            raise torch.OutOfMemoryError("too large")

    toy = toy_engine(n_slots=3, batch_size=32)
    toy.target.spoil = small_device
    tokens, last = run(toy)
    assert isinstance(last["c"], Failed)
    assert (tokens["a"], tokens["b"]) == (expected["a"], expected["b"])


def test_long_prompts_do_not_hold_up_a_running_stream() -> None:
    toy = toy_engine(n_slots=2, batch_size=8)
    toy.engine.add(toy_slot("short", [1, 2], max_tokens=50))
    toy.engine.step()
    toy.engine.add(toy_slot("long", [3] * 100, max_tokens=5))
    for _ in range(10):
        heard = [name for name, event in toy.engine.step() if isinstance(event, Delta)]
        assert "short" in heard


def test_prompts_alone_run_in_longer_passes() -> None:
    """While a stream decodes none is longer than what it shares; behind it they are again."""
    toy = toy_engine(n_slots=2, batch_size=36, shared_size=9)
    rows: dict[bool, int] = {}

    def seen(batch: Batch, logits: Tensor) -> None:
        decodes = any(len(span.token_ids) == 1 and span.n_past for span in batch.spans)
        rows[decodes] = max(rows.get(decodes, 0), len(batch.token_ids))

    toy.target.spoil = seen
    toy.engine.add(toy_slot("short", [1, 2], max_tokens=4))
    toy.engine.step()
    toy.engine.add(toy_slot("long", [3] * 100, max_tokens=5))
    while toy.engine.busy:
        toy.engine.step()
    assert rows == {True: 9, False: 36}


def test_a_second_request_with_the_same_prompt_starts_from_the_cache(expected: dict[str, list[int]]) -> None:
    toy = toy_engine(n_slots=1)
    run(toy)
    tokens, last = run(toy)
    assert tokens == expected
    done = last["c"]
    assert isinstance(done, Done)
    assert done.usage.n_cached == 8


def test_warm_up_leaves_no_trace() -> None:
    toy = toy_engine(batch_size=16)
    toy.engine.warm_up(enough_s=0.0)
    assert toy.engine.stats().n_pages_free == 64


def test_warm_up_measures_rows_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows would ask for the same experts, and a pass of a mixture of experts would look too cheap."""
    widths: list[int] = []

    def forward(self: ToyNetwork, batch: Batch, store: Store, taps: Taps | None = None) -> Tensor:
        assert len(set(batch.token_ids.tolist())) == min(len(batch.token_ids), self.vocab_size)
        widths.append(len(batch.token_ids))
        return torch.zeros(1)

    monkeypatch.setattr(ToyNetwork, "forward", forward)
    toy_engine(batch_size=16).engine.warm_up(enough_s=inf)
    assert sorted(set(widths)) == [n_rows for n_rows in WIDTHS if n_rows <= 16]
