"""The real engine keeps the contract that the HTTP tests' fake is held to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from slipstream.engine.api import Delta, Done, Event, Failed
from slipstream.engine.constraints import Grammar
from slipstream.engine.errors import TimedOut
from slipstream.engine.service.run.event_stream import Stream
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from tests.http import contract

DEMO = Path(__file__).parents[2] / "demo"

Start = Callable[[], ThreadEngine]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A fresh engine on the demo pair; small, so that requests wait and pages run short."""

    def fresh() -> ThreadEngine:
        return launch(
            Settings(
                model=str(DEMO / "target"),
                model_draft=str(DEMO / "draft"),
                ctx_size=1024,  # so that a reply without limit outlasts what is done to it
                parallel=2,
                spec_type="prediction,suffix,ngram-simple,draft-model",
                spec_ngram_simple_size_n=3,
                spec_adaptive=False,  # what is drafted must not depend on how fast the machine is just now
                slot_save_path=str(slots),
                threads=1,
            )
        )

    slots = tmp_path_factory.mktemp("slots")
    return fresh


@pytest.fixture(scope="module")
def engine(start: Start) -> Iterator[ThreadEngine]:
    engine = start()
    yield engine
    asyncio.run(engine.close())


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
async def test_real_engine(check: contract.Check, engine: ThreadEngine) -> None:
    await check(engine)
    stats = await contract.idle(engine)  # a cancel takes effect at the engine's next turn
    assert stats.n_pages_held == 0
    assert stats.n_pages_free + stats.n_pages_cached == engine.info.n_pages


@pytest.mark.parametrize("check", contract.ENDINGS, ids=lambda check: check.__name__)
async def test_real_engine_ending(check: contract.Check, start: Start) -> None:
    await check(start())


async def test_a_hundred_cancelled_streams_leave_nothing_behind(engine: ThreadEngine) -> None:
    async def leave(number: int) -> None:
        request = contract.ask(
            f"cancel-{number}", prompt="one two three " * (1 + number % 7), max_tokens=None
        )
        stream = await engine.submit(request)
        for _ in range(number % 4):
            await anext(stream)
        await stream.aclose()

    for first in range(0, 100, 10):
        await asyncio.gather(*(leave(number) for number in range(first, first + 10)))
    stats = await contract.idle(engine)
    assert stats.n_pages_held == 0
    assert stats.n_pages_free + stats.n_pages_cached == engine.info.n_pages


async def test_a_second_request_is_served_from_the_prefix_cache(engine: ThreadEngine) -> None:
    prompt = "def add(a, b): return a + b " * 15
    _, first = await contract.outcome(engine, contract.ask("cold", prompt=prompt))
    _, second = await contract.outcome(engine, contract.ask("hit", prompt=prompt))
    assert second.usage.n_cached >= 64 > first.usage.n_cached
    _, other = await contract.outcome(engine, contract.ask("other", prompt=prompt, tenant="somebody else"))
    assert other.usage.n_cached == 0


async def test_preparing_counts_on_a_requests_time(
    engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that waits to be compiled. Nothing is left of the request."""
    asked: list[Future[object]] = []

    def never(*_: object) -> Future[object]:
        asked.append(Future())
        return asked[-1]

    monkeypatch.setattr(engine._preparing._text.grammars, "constraint", never)
    monkeypatch.setattr(engine._preparing, "_limit_s", 0.2)
    with pytest.raises(TimedOut, match=r"0\.2 s"):
        await engine.submit(contract.ask("late", grammar=Grammar("regex", "a")))
    assert asked[0].cancelled()
    assert not engine._n_preparing.total()
    assert not (await contract.idle(engine)).n_waiting


async def test_an_event_that_cannot_be_delivered_ends_its_request_alone(
    engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deltas, _ = await contract.outcome(engine, contract.ask("before", max_tokens=40))
    broken = await engine.submit(contract.ask("broken", max_tokens=400))
    fine = await engine.submit(contract.ask("fine", max_tokens=40))
    push = Stream.push

    def refuse(self: Stream, event: Event) -> None:
        if self is broken:
            raise RuntimeError("put in")
        push(self, event)

    monkeypatch.setattr(Stream, "push", refuse)
    *_, end = await contract.events_of(broken)
    assert isinstance(end, Failed)
    events = await contract.events_of(fine)
    assert isinstance(events[-1], Done)
    assert _text(events) == _text(deltas)
    assert [one.message for one in caplog.records] == ["delivery failed request=contract-broken"]
    assert (await contract.idle(engine)).n_pages_held == 0


def _text(events: Sequence[Event]) -> str:
    return "".join(one.text for one in events if isinstance(one, Delta))
