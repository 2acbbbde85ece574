"""Faults that are put into one request's share of a step: it ends with one cause in the log, the others go on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Delta, Done, Event, Failed
from slipstream.engine.batch import Batch
from slipstream.engine.cache import saved
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.store import Store
from slipstream.engine.core import engine as engine_module
from slipstream.engine.errors import StepFailed
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.bench.garbage import Garbage
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.account import Account
from slipstream.engine.speculate.decide.asking import Asking
from slipstream.engine.speculate.decide.cost import Costs
from slipstream.engine.speculate.decide.overlap import Overlap
from slipstream.engine.speculate.decide.survival import Shadows, Survival
from slipstream.engine.speculate.decide.trials import Allowance
from slipstream.engine.speculate.decide.value import Lengths
from slipstream.engine.speculate.drafter import Drafter
from slipstream.engine.speculate.network.draft_model import DraftModel
from tests.unit.toy import VOCAB, Toy, ToyNetwork, toy_engine, toy_slot

PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8], "c": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}
POISON = -7.0  # stands for NaN in a page: whoever reads it gets no number


class Poisonable(ToyNetwork):
    """A toy that writes NaN into its pages when it is told to, and whose logits are NaN wherever it reads that."""

    is_sick = False

    def forward(self, batch: Batch, store: Store, taps: Taps | None = None) -> Tensor:
        if not self.is_sick:
            return super().forward(batch, store, taps)
        sick, self.is_sick = batch.token_ids.clone(), False
        batch.token_ids.fill_(int(POISON))
        logits = super().forward(batch, store, taps)
        batch.token_ids.copy_(sick)
        return logits

    def _logits(self, tokens: np.ndarray) -> np.ndarray:
        return np.full(32, np.nan) if POISON in tokens else super()._logits(tokens)


def poisonable(**options: Any) -> Toy:
    toy = toy_engine(**options)
    network = Poisonable()
    toy.engine.target = engine_module.replace(toy.engine.target, network=network)  # type: ignore[type-var]
    return Toy(toy.engine, toy.cache, network)


def play(
    toy: Toy, prompts: dict[str, list[int]], **options: Any
) -> tuple[dict[str, list[int]], dict[str, Event]]:
    for name, prompt in prompts.items():
        toy.engine.add(toy_slot(name, prompt, **options))
    return finish(toy)


def finish(toy: Toy) -> tuple[dict[str, list[int]], dict[str, Event]]:
    tokens: dict[str, list[int]] = {}
    last: dict[str, Event] = {}
    for _ in range(1000):
        if not toy.engine.busy:
            break
        for name, event in toy.engine.step():
            assert name not in last, "an event after the last one"
            if isinstance(event, Delta):
                tokens.setdefault(name, []).extend(event.token_ids)
            else:
                last[name] = event
    stats = toy.engine.stats()
    assert stats.n_pages_held == 0
    assert not any(slot.busy for slot in stats.slots)
    return tokens, last


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return play(toy_engine(n_slots=1), PROMPTS)[0]


def causes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The requests that the log says have failed."""
    found = [one for one in caplog.records if one.message.startswith("request failed")]
    assert all(one.levelno == logging.ERROR for one in found)
    return [str(one.args[0]) for one in found if one.args]


def test_pages_of_a_spoiled_pass_serve_no_later_request(caplog: pytest.LogCaptureFixture) -> None:
    """The prompt's first chunk is spoiled and published before a pick shows it."""
    prompt = list(range(1, 13))
    expected = play(poisonable(batch_size=8), {"fine": prompt})[0]["fine"]
    toy = poisonable(batch_size=8)
    toy.target.is_sick = True  # type: ignore[attr-defined]
    _, last = play(toy, {"sick": prompt})
    assert isinstance(last["sick"], Failed)
    assert causes(caplog) == ["sick"]
    for number in range(5):
        tokens, last = play(toy, {f"later{number}": prompt})
        assert isinstance(last[f"later{number}"], Done)
        assert tokens[f"later{number}"] == expected
    assert "made anew" not in caplog.text, "not even the first has met them"


def test_a_request_behind_pages_that_another_spoiled_starts_over(caplog: pytest.LogCaptureFixture) -> None:
    """It has adopted them before their maker failed; it must not fail with it."""
    prompt = list(range(1, 25))
    expected = play(poisonable(batch_size=8), {"fine": prompt})[0]["fine"]
    toy = poisonable(batch_size=8)
    toy.target.is_sick = True  # type: ignore[attr-defined]
    toy.engine.add(toy_slot("sick", prompt))
    toy.engine.step()
    toy.engine.add(toy_slot("behind", prompt))
    tokens, last = finish(toy)
    assert isinstance(last["sick"], Failed)
    assert tokens["behind"] == expected
    done = last["behind"]
    assert isinstance(done, Done)
    assert done.usage.n_cached == 0
    assert causes(caplog) == ["sick"]


def test_a_request_that_is_never_a_number_starts_over_once(caplog: pytest.LogCaptureFixture) -> None:
    def spoil(batch: Batch, logits: Tensor) -> None:
        logits[:] = torch.nan

    toy = toy_engine()
    prompt = PROMPTS["c"]
    play(toy, {"a": prompt})
    toy.target.spoil = spoil
    assert isinstance(play(toy, {"never": prompt})[1]["never"], Failed)
    assert causes(caplog) == ["never"]


def in_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine_module.keep

    def keep(slot: Slot, *rest: Any) -> Any:
        check(slot)
        return real(slot, *rest)

    monkeypatch.setattr(engine_module, "keep", keep)


def in_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    around(monkeypatch, Cache, "publish", lambda cache, slot_id, tokens, n_prompt: tokens[:2] == [9, 8])


def in_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    around(monkeypatch, Cache, "commit", lambda cache, slot_id, store, n: slot_id == 1)


def in_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    around(monkeypatch, Cache, "reserve", lambda cache, slot_id, *rest: slot_id == 1)


def in_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    around(monkeypatch, Cache, "begin", lambda cache, slot_id, tokens, *rest: tokens[:2] == [9, 8])


def in_drafters_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    around(monkeypatch, Chain, "begin", lambda chain, slot: slot.request.id == "b")


def in_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    around(monkeypatch, Chain, "credit", lambda chain, slot, *rest: slot.request.id == "b")


def in_done(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine_module.done

    def done(slot: Slot, *rest: Any, **options: Any) -> Any:
        check(slot)
        return real(slot, *rest, **options)

    monkeypatch.setattr(engine_module, "done", done)


def around(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_hit: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if is_hit(*arguments):
            raise RuntimeError("put in")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def check(slot: Slot) -> None:
    if slot.request.id == "b":
        raise RuntimeError("put in")


PLACES = (in_keep, in_publish, in_commit, in_reserve, in_begin, in_drafters_begin, in_credit, in_done)


@pytest.mark.parametrize("put_in", PLACES, ids=lambda one: one.__name__)
def test_a_fault_in_one_requests_share_of_a_step_ends_it_alone(
    put_in: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: dict[str, list[int]],
) -> None:
    toy = toy_engine(n_slots=3)
    put_in(monkeypatch)
    tokens, last = play(toy, PROMPTS)
    failed = last["b"]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StepFailed)
    assert (tokens["a"], tokens["c"]) == (expected["a"], expected["c"])
    assert causes(caplog) == ["b"]
    assert "put in" in caplog.text
    monkeypatch.undo()
    assert play(toy, {"b": PROMPTS["b"]})[0]["b"] == expected["b"], "its slot serves again"


def test_a_fault_while_a_request_is_asked_to_finish_ends_it_alone(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[int]]
) -> None:
    toy = toy_engine(n_slots=3)
    for name, prompt in PROMPTS.items():
        toy.engine.add(toy_slot(name, prompt))
    found: dict[str, list[int]] = {name: [] for name in PROMPTS}
    for _ in range(4):
        for name, event in toy.engine.step():
            assert isinstance(event, Delta)
            found[name] += event.token_ids
    in_done(monkeypatch)
    ((_, event),) = toy.engine.finish("b")
    assert isinstance(event, Failed)
    tokens, _ = finish(toy)
    assert found["a"] + tokens["a"] == expected["a"]


def test_withdrawing_takes_held_pages_and_snapshots() -> None:
    toy = toy_engine()
    prompt = list(range(1, 14))
    toy.engine.add(toy_slot("a", prompt))
    for _ in range(3):
        toy.engine.step()
    assert saved.save(toy.cache, prompt, "").tokens
    assert saved.erase(toy.cache, prompt, "") == 0, "a slot holds them"
    assert saved.erase(toy.cache, prompt, "", held=True) == 12
    assert not saved.save(toy.cache, prompt, "").tokens


DECISIONS = (
    (Lengths, "begin"),
    (Lengths, "token_s"),
    (Lengths, "measures_plain"),
    (Lengths, "price"),
    (Lengths, "trim"),
    (Lengths, "depth"),
    (Survival, "begin"),
    (Survival, "of"),
    (Survival, "expected"),
    (Shadows, "begin"),
    (Shadows, "watch"),
    (Shadows, "judge"),
    (Shadows, "drop"),
    (Allowance, "pays"),
    (Allowance, "credit"),
    (Allowance, "end"),
    (Costs, "at"),
    (Costs, "passed"),
    (Costs, "draft_s"),
    (Costs, "drafted"),
    (Account, "consider"),
    (Account, "drafted"),
    (Account, "worked"),
    (Overlap, "ask"),
    (Overlap, "gain"),
    (Overlap, "waited"),
    (Overlap, "reads_first"),
    (Asking, "asked"),
    (Asking, "promise"),
    (DraftModel, "n_unfed"),
)


@pytest.mark.sampled(keep=len(DECISIONS))  # each with fewer engines
@pytest.mark.parametrize(("owner", "name"), DECISIONS, ids=lambda one: getattr(one, "__name__", one))
def test_a_fault_in_deciding_about_drafts_costs_drafts_alone(
    owner: type,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: dict[str, list[int]],
    *,
    is_whole: bool,
) -> None:
    n_calls = 0

    def is_hit(*_: object) -> bool:
        nonlocal n_calls
        n_calls += 1
        return n_calls > 3

    around(monkeypatch, owner, name, is_hit)
    ways = [*product((False, True), repeat=2)]
    for adaptive, overlaps in ways if is_whole else ways[1:]:
        toy = toy_engine(drafting, n_slots=3, adaptive=adaptive, overlaps=overlaps)
        tokens, last = play(toy, PROMPTS, types=("draft-model", "garbage"))
        assert tokens == expected
        assert all(isinstance(event, Done) for event in last.values())
    assert "put in" in caplog.text
    told = [one for one in caplog.messages if one.startswith("a decision about drafts failed")]
    assert len(told) <= 3 * 4, "the first of an engine, the tenth, the hundredth"


def drafting(cache: Cache) -> list[Drafter]:
    return [DraftModel(ToyNetwork(agreement=0.8), cache, 16, 64), Garbage(VOCAB)]  # type: ignore[arg-type]
