"""Replies of a cluster whose replicas die and leave are those of one engine that is left alone: everything but Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from slipstream.engine.api import Delta, Event, EventStream, Failed, Request, Sampling
from slipstream.engine.errors import (
    EngineError,
    EngineStopped,
    InvalidRequest,
    Overloaded,
    ReplicasFailed,
    Unsupported,
)
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.server.cluster import placement
from slipstream.server.cluster.cluster_engine import ClusterEngine
from slipstream.server.cluster.hosting import Host
from tests.http import contract
from tests.service.hosts import Died, Hosts, cluster
from tests.service.test_emitted import TARGET
from tests.service.test_moving_engines import N_REQUESTS, N_SAMPLE, hold_against, requests
from tests.service.told import told

ABOUT = ("server/cluster/*.py",)

N_STREAMS, MOST_MOVES = 24, 12
ASK = Request(id="one", prompt="def add(left, right):", max_tokens=40, sampling=Sampling(seed=3))


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ThreadEngine]]:
    made = [
        launch(
            Settings(model=TARGET, ctx_size=512, parallel=4, threads=1, max_queue=N_REQUESTS, spec_type=types)
        )
        for types in ("suffix", "suffix", "none")
    ]
    yield made
    for one in made:
        asyncio.run(one.close())


async def read(stream: EventStream) -> list[Event]:
    return [event async for event in stream]


async def played(engine: ClusterEngine, asked: list[Request]) -> dict[str, list[Event]]:
    """The events of all requests, so many at once."""
    found: dict[str, list[Event]] = {}
    left = iter(asked)

    async def stream() -> None:
        for request in left:
            try:
                found[request.id] = await read(await engine.submit(request))
            except EngineError as error:  # before it was admitted
                found[request.id] = [Failed(error)]

    async with asyncio.TaskGroup() as group:
        for _ in range(N_STREAMS):
            group.create_task(stream())
    return found


async def until_idle(host: Host) -> None:
    async with asyncio.timeout(30):
        while host.running:
            await asyncio.sleep(0.01)


@pytest.mark.sampled
async def test_replicas_die_under_many_streams(engines: list[ThreadEngine], *, is_whole: bool) -> None:
    """They die when nothing runs alone: what dies then cannot be told from what the request has killed."""
    asked = [replace(one, slot=None) for one in requests()[: N_REQUESTS if is_whole else N_SAMPLE]]

    async def trouble(hosts: Hosts) -> None:
        while True:
            await asyncio.sleep(hosts.draw.uniform(0.05, 0.2))
            free = [name for name in hosts.there if not hosts.n_alone[name]]
            if free:
                await hosts.kill(hosts.draw.choice(free))

    async with cluster(engines, MOST_MOVES) as (engine, hosts):
        troubling = asyncio.create_task(trouble(hosts))
        found = await played(engine, asked)
        troubling.cancel()
        assert hosts.n_died >= (5 if is_whole else 1)
    await hold_against(engines[0], asked, found)


@pytest.mark.sampled
async def test_a_replica_that_leaves_hands_over_what_it_has(engines: list[ThreadEngine]) -> None:
    long = [
        replace(ASK, id=f"r{i}", max_tokens=480, sampling=Sampling(seed=i, ignore_eos=True)) for i in range(6)
    ]
    async with cluster(engines, 1) as (engine, hosts):
        streams = [await engine.submit(one) for one in long]
        begun = [await anext(one) for one in streams]
        busiest = max(hosts.there, key=lambda name: len(hosts.there[name].running))
        gone = hosts.there.pop(busiest)
        engine.are_there(list(hosts.there))
        rest = await asyncio.gather(*(read(one) for one in streams))
        found = {one.id: [first, *more] for one, first, more in zip(long, begun, rest, strict=True)}
        assert max(one.n_moves for one in streams) == 1
        await until_idle(gone)
    assert all(isinstance(events[-2], Delta) for events in found.values())
    await hold_against(engines[0], long, found)


@pytest.mark.sampled
async def test_a_request_that_kills_is_failed_and_nobody_else(engines: list[ThreadEngine]) -> None:
    others = [replace(one, slot=None) for one in requests()[:24]]
    poison = replace(
        ASK, id="poison", prompt="rm -rf /", sampling=Sampling(seed=1, ignore_eos=True), max_tokens=400
    )

    async def strike(hosts: Hosts) -> None:
        """Where the poison runs, the replica dies."""
        while True:
            await asyncio.sleep(0.005)
            for name, host in list(hosts.there.items()):
                if any(run.startswith("poison/") for run in host.running):
                    await hosts.kill(name)

    async with cluster(engines, MOST_MOVES) as (engine, hosts):
        striking = asyncio.create_task(strike(hosts))
        found = await played(engine, [*others[:8], poison, *others[8:]])
        striking.cancel()
        assert hosts.n_died == 2, "one death that makes it suspect, one that convicts it"
    assert told(found.pop("poison")).end[0] is ReplicasFailed
    await hold_against(engines[0], others, found)


async def test_a_request_that_kills_before_the_loop_turns_is_found_out(
    engines: list[ThreadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replica dies within the call that gives the request to the engine."""
    monkeypatch.setattr(placement, "PATIENCE_S", 20)
    async with cluster(engines, MOST_MOVES) as (engine, hosts):

        async def dying(one: ThreadEngine, request: Request) -> EventStream:
            await hosts.kill(next(name for name, host in hosts.there.items() if host.engine is one))
            raise Died("its process is gone")

        for one in engines:
            monkeypatch.setattr(one, "submit", partial(dying, one))
        with pytest.raises(ReplicasFailed):
            await engine.submit(ASK)
    assert hosts.n_died == 2


async def test_what_is_wrong_is_refused_as_by_an_engine(engines: list[ThreadEngine]) -> None:
    async with cluster(engines, 3) as (engine, _):
        with pytest.raises(Unsupported, match="id_slot"):
            await engine.submit(replace(ASK, slot=0))
        with pytest.raises(InvalidRequest, match="top_logprobs: 21 is not between 0 and 20"):
            await engine.submit(replace(ASK, logprobs=21))
        with pytest.raises(Unsupported):
            await engine.save_slot(0, "file", "")
        assert await engine.tokenize("def", add_special=False, parse_special=True) == await engines[
            0
        ].tokenize("def", add_special=False, parse_special=True)


async def test_one_owner_leaves_places_to_others(engines: list[ThreadEngine]) -> None:
    async with cluster(engines[:1], 3) as (engine, _):
        engine.n_queue = 4
        asked = [replace(ASK, id=f"a{i}", owner="a", sampling=Sampling(ignore_eos=True)) for i in range(9)]
        streams = [await engine.submit(one) for one in asked[:8]]
        with pytest.raises(Overloaded, match="all 8 places are taken"):
            await engine.submit(asked[8])
        for one in streams:
            await one.aclose()
        assert await engine.submit(replace(ASK, id="b", owner="b"))


async def test_another_model_takes_no_request(
    engines: list[ThreadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "PATIENCE_S", 0.3)
    async with cluster(engines, 3) as (engine, hosts):
        engine.begin(replace(engines[0].info, fingerprint="another"))
        with pytest.raises(Overloaded, match="no replica has taken the request"):
            await engine.submit(ASK)
        assert hosts.n_bounced > 1


async def test_a_stranger_on_the_port_is_turned_away(engines: list[ThreadEngine]) -> None:
    async with cluster(engines, 3) as (engine, _):
        for words in (b'{"word":"guess","replica":"replica-0"}', b"\xff{", b""):
            reader, writer = await asyncio.open_connection(*engine.runs.address)
            writer.write(len(words).to_bytes(4, "little") + words)
            if not words:
                writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        assert not engine.runs.stats
        assert [event async for event in await engine.submit(ASK)]


async def test_what_a_client_leaves_ends_at_its_replica(engines: list[ThreadEngine]) -> None:
    async with cluster(engines, 3) as (engine, hosts):
        stream = await engine.submit(replace(ASK, max_tokens=400, sampling=Sampling(ignore_eos=True)))
        await anext(stream)
        assert sum(len(host.running) for host in hosts.there.values()) == 1
        await stream.aclose()
        for host in hosts.there.values():
            await until_idle(host)


async def test_what_is_asked_when_a_replica_dies_is_asked_again(
    engines: list[ThreadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(engines, 3) as (engine, hosts):
        ask, n_died = hosts.ask, 0

        async def dying(verb: str, *arguments: object, **named: object) -> object:
            nonlocal n_died
            n_died += 1
            if n_died < 3:
                raise Died("replica-0")
            return await ask(verb, *arguments, **named)

        monkeypatch.setattr(hosts, "ask", dying)
        assert (
            await engine.detokenize(await engine.tokenize("def", add_special=False, parse_special=True))
            == "def"
        )
        monkeypatch.setattr(placement, "_AGAIN_S", 0.0)
        n_died = -100
        with pytest.raises(Overloaded, match="no replica has answered in 8 tries"):
            await engine.detokenize([5])


@pytest.mark.parametrize("check", contract.ENDINGS, ids=lambda check: check.__name__)
async def test_it_ends_as_an_engine_does(check: contract.Check, engines: list[ThreadEngine]) -> None:
    async with cluster(engines, MOST_MOVES) as (engine, hosts):
        await check(engine)
        for host in hosts.there.values():
            await until_idle(host)


@pytest.mark.sampled
async def test_what_still_runs_when_a_drain_is_over_fails(engines: list[ThreadEngine]) -> None:
    """Also what has lost its replica, and waits for another."""
    long = replace(ASK, max_tokens=400, sampling=Sampling(ignore_eos=True))
    async with cluster(engines[:1], MOST_MOVES) as (engine, hosts):
        unread = await engine.submit(long)
        left = await engine.submit(replace(long, id="left"))
        await anext(left)
        ((name, host),) = hosts.there.items()
        hosts.there.clear()
        engine.runs.lose(name, "it stops", died=False)
        reading = asyncio.create_task(read(left))
        await until_idle(host)
        async with asyncio.timeout(5):
            await engine.drain(0.0)
            for events in (await reading, await read(unread)):
                assert isinstance(events[-1], Failed)
                assert isinstance(events[-1].error, EngineStopped)
