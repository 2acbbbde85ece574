"""A replica's part: who may run beside whom, orders, and what is said at the end of a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.api import Delta, Event, Failed, Request
from slipstream.engine.errors import EngineFault, EngineStopped, InvalidRequest
from slipstream.engine.service.run.event_stream import Stream
from slipstream.server.cluster import hosting
from slipstream.server.cluster.hosting import Host
from slipstream.server.cluster.moving import ReplicaLost
from slipstream.server.cluster.run_frames import Assignment, Ending
from slipstream.server.cluster.runs import Run, Runs
from tests.unit.test_cluster_parts import EVENTS, stats

DONE = EVENTS[3]
WORD = Delta("word", (1,), (None,), ("word",))


class Scripted:
    """As much of an engine as a host asks for; the test sends its events."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(fingerprint="model")
        self.status = "ready"
        self.streams: dict[str, Stream] = {}
        self.ended: list[str] = []
        self.refuses: Exception | None = None

    async def submit(self, request: Request) -> Stream:
        if self.refuses is not None:
            raise self.refuses
        ends = [
            lambda verb=verb: self.ended.append(f"{verb} {request.prompt}") for verb in ("finish", "cancel")
        ]
        stream = self.streams[str(request.prompt)] = Stream((8, 9), "tail", finish=ends[0], cancel=ends[1])
        return stream

    def stats(self) -> Any:
        return stats(len(self.streams))


class House:
    """A host and an ingress' runs, with a connection between them."""

    def __init__(self, runs: Runs) -> None:
        self.engine = Scripted()
        self.host = Host(self.engine, "replica-1")
        self.runs = runs
        self.calls: dict[str, asyncio.Task[Ending]] = {}

    def ask(self, prompt: str, **more: Any) -> Run:
        run = self.runs.new(prompt)
        request = Request(id=prompt, prompt=prompt)
        asked = Assignment(run.name, request, self.runs.address, self.runs.word, **more)
        self.calls[prompt] = asyncio.create_task(self.host.run(asked))
        return run

    async def admitted(self, prompt: str, **more: Any) -> Run:
        run = self.ask(prompt, **more)
        await asyncio.wait_for(run.admitted, 5)
        return run

    def push(self, prompt: str, event: Event) -> None:
        self.engine.streams[prompt].push(event)

    async def outcome(self, prompt: str) -> str:
        return (await asyncio.wait_for(self.calls[prompt], 5)).outcome


@asynccontextmanager
async def house() -> AsyncIterator[House]:
    runs = Runs()
    await runs.open("127.0.0.1")
    one = House(runs)
    try:
        yield one
    finally:
        await one.host.close()
        await runs.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_run_brings_its_prompt_and_its_events() -> None:
    async with house() as at:
        run = await at.admitted("a")
        assert (tuple(run.prompt_ids), run.prompt_tail, run.replica) == ((8, 9), "tail", "replica-1")
        at.push("a", WORD)
        at.push("a", DONE)
        assert [event async for event in run] == [WORD, DONE]
        assert await at.outcome("a") == "over"
        await until(lambda: at.runs.stats.get("replica-1") == stats(1))


async def test_orders_reach_the_engine() -> None:
    async with house() as at:
        run = await at.admitted("a")
        run.finish()
        await until(lambda: at.engine.ended == ["finish a"])
        await run.aclose()
        await until(lambda: at.engine.ended == ["finish a", "cancel a"])
        assert await at.outcome("a") == "over"


async def test_who_runs_alone_waits_for_the_others_and_they_for_it() -> None:
    async with house() as at:
        first = await at.admitted("first")
        alone = at.ask("alone", alone=True)
        await until(lambda: at.host.is_held)
        assert at.ask("third").replica == ""
        assert await at.outcome("third") == "busy"
        assert not alone.admitted.done()
        at.push("first", DONE)
        await asyncio.wait_for(alone.admitted, 5)
        assert [event async for event in first] == [DONE]
        second = at.ask("second", alone=True)
        await asyncio.sleep(0.02)
        assert not second.admitted.done(), "two that must be alone take turns"
        alone.trust()
        await asyncio.sleep(0.02)
        assert not second.admitted.done()
        at.push("alone", DONE)
        await asyncio.wait_for(second.admitted, 5)
        second.trust()
        await until(lambda: not at.host.is_held)
        await at.admitted("fourth")


async def test_who_runs_long_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "ROOM_S", 0.01)
    async with house() as at:
        long = await at.admitted("long")
        at.push("long", WORD)
        alone = at.ask("alone", alone=True)
        assert await anext(long) == WORD
        with pytest.raises(ReplicaLost) as lost:
            await anext(long)
        assert not lost.value.died
        await asyncio.wait_for(alone.admitted, 5)
        assert at.engine.ended == ["cancel long"]


async def test_who_gives_up_waiting_to_be_alone_holds_nothing() -> None:
    async with house() as at:
        await at.admitted("first")
        at.ask("alone", alone=True)
        await until(lambda: at.host.is_held)
        at.calls["alone"].cancel()
        await until(lambda: not at.host.is_held)
        await at.admitted("second")


async def test_another_model_is_not_run() -> None:
    async with house() as at:
        at.ask("a", fingerprint="another")
        assert await at.outcome("a") == "another_model"
        await at.admitted("b", fingerprint="model")


@pytest.mark.parametrize(
    ("error", "wanted"),
    [(InvalidRequest("seed", "is bad"), InvalidRequest), (RuntimeError("a bug"), EngineFault)],
)
async def test_a_refusal_arrives(error: Exception, wanted: type[Exception]) -> None:
    async with house() as at:
        at.engine.refuses = error
        run = at.ask("a")
        with pytest.raises(wanted):
            await asyncio.wait_for(run.admitted, 5)


@pytest.mark.parametrize(("status", "died"), [("failed", True), ("draining", False)])
async def test_an_engine_that_stops_is_a_lost_replica(status: str, died: bool) -> None:
    async with house() as at:
        run = await at.admitted("a")
        at.engine.status = status
        at.push("a", WORD)
        at.push("a", Failed(EngineStopped("over")))
        assert await anext(run) == WORD
        with pytest.raises(ReplicaLost) as lost:
            await anext(run)
        assert lost.value.died is died


async def test_a_broken_connection_is_a_death_for_what_had_begun_alone() -> None:
    async with house() as at:
        begun, waiting = await at.admitted("a"), at.ask("b", alone=True)
        await until(lambda: at.host.is_held)
        await at.host.close()
        with pytest.raises(ReplicaLost) as lost:
            await anext(begun)
        assert lost.value.died
        assert not waiting.admitted.done(), "its call says so"
        await until(lambda: at.engine.ended == ["cancel a"])
        assert await at.outcome("b") == "over"


async def test_what_runs_for_an_ingress_ends_with_it() -> None:
    async with house() as at:
        await at.admitted("a")
        await at.runs.close()
        await until(lambda: at.engine.ended == ["cancel a"])
        assert await at.outcome("a") == "over"
        # Another ingress finds a replica that runs nothing.
        assert not at.host.running


async def test_an_ingress_out_of_reach_is_an_error() -> None:
    async with house() as at:
        run = at.runs.new("a")
        port = at.runs.address[1]
        await at.runs.close()
        asked = Assignment(run.name, Request(id="a", prompt="a"), ("127.0.0.1", port), "word")
        with pytest.raises(OSError, match=r"refused|Connect"):
            await at.host.run(asked)
        again = Runs()
        await again.open("127.0.0.1")
        asked = replace(asked, ingress=again.address, word=again.word)
        calling = asyncio.create_task(at.host.run(asked))
        await until(lambda: "a" in at.engine.streams)
        at.push("a", DONE)
        assert (await calling).outcome == "over"
        await again.close()


async def test_who_comes_while_a_connection_is_made_does_not_run_beside_one_alone() -> None:
    async with house() as at:
        at.ask("alone", alone=True)
        at.ask("other")  # both wait for the same first connection
        assert await at.outcome("other") == "busy"
