"""Replies over engines that are lost at random are those of one engine that is left alone.

Three engines on the demo model; a request of each kind that `test_emitted` cuts, and more, over many streams.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from slipstream.engine.api import Delta, Event, Request
from slipstream.engine.errors import ReplicasFailed
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.server.cluster.moving import ReplicaLost, submit
from tests.service.replicas import House, Run
from tests.service.test_emitted import CASES, TARGET
from tests.service.told import Told, events_of, told

ABOUT = ("server/cluster/*.py",)
pytestmark = pytest.mark.sampled

N_REQUESTS, N_STREAMS, MOST_MOVES = 240, 24, 12
N_SAMPLE = 32  # two of each kind
POISON = "rm -rf /"


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


def requests() -> list[Request]:
    """Of all kinds, with seeds of their own; one in eight without."""
    draw = random.Random(1)
    names = list(CASES)
    found = []
    for i in range(N_REQUESTS):
        case = CASES[names[i % len(names)]]
        seed = None if draw.random() < 1 / 8 else draw.randrange(1 << 40)
        found.append(replace(case, id=f"r{i}", sampling=replace(case.sampling, seed=seed)))
    return found


class Trouble:
    """Loses the replica of a running request now and then, and that of the poison always."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.house: House | None = None
        self._draw = random.Random(2)

    def __call__(self, run: Run) -> None:
        local = run.chosen.local
        assert self.house is not None
        if run.request.id == "poison":
            if run.n_deltas >= 3:
                self.house.lose(local, ReplicaLost("poisoned"))
        elif self._draw.random() < self.share:
            # What dies of itself while a suspect has it alone cannot be told from what the suspect has killed; of the
            # others as many die as are drained, so that a run has enough of both.
            n_lost = self.house.n_lost
            died = not local.is_held and n_lost[True] <= n_lost[False]
            self.house.lose(local, ReplicaLost("lost", died=died))


async def played(house: House, asked: list[Request]) -> dict[str, list[Event]]:
    """The events of all requests, so many at once."""
    found: dict[str, list[Event]] = {}
    left = iter(asked)

    async def stream() -> None:
        for request in left:
            found[request.id] = [event async for event in await submit(house, request, MOST_MOVES)]

    async with asyncio.TaskGroup() as group:
        for _ in range(N_STREAMS):
            group.create_task(stream())
    return found


async def undisturbed(engine: ThreadEngine, request: Request, like: Told) -> Told:
    """The reply of one engine; a request without a seed gets the one that its other reply had."""
    seed = like.end[3] if request.sampling.seed is None else request.sampling.seed
    sampling = replace(request.sampling, seed=seed)
    return told(await events_of(engine, replace(request, sampling=sampling)))


async def hold_against(engine: ThreadEngine, asked: list[Request], found: dict[str, list[Event]]) -> None:
    """Raises AssertionError unless each reply is that of one engine. How far prompts were depends on what is cached."""
    assert sorted(found) == sorted(one.id for one in asked)
    every = [told(found[one.id]) for one in asked]
    alike = zip(asked, every, strict=True)
    left_alone = await asyncio.gather(*(undisturbed(engine, one, mine) for one, mine in alike))
    for request, mine, theirs in zip(asked, every, left_alone, strict=True):
        assert replace(mine, progress=()) == replace(theirs, progress=()), request
        assert list(mine.progress) == sorted(set(mine.progress))
        assert bool(mine.progress) == request.progress


@pytest.mark.sampled
async def test_replicas_are_lost_and_no_reply_is(engines: list[ThreadEngine], *, is_whole: bool) -> None:
    trouble = Trouble(0.02)
    trouble.house = house = House(engines, trouble)
    asked = requests() if is_whole else requests()[:N_SAMPLE]
    found = await played(house, asked)
    share = len(asked) / N_REQUESTS
    assert min(house.n_lost.values()) >= 10 * share, "by death and by drain"
    assert house.n_alone >= 20 * share
    await hold_against(engines[0], asked, found)


async def test_poison_is_failed_and_nobody_else(engines: list[ThreadEngine]) -> None:
    trouble = Trouble(0.0)
    trouble.house = house = House(engines, trouble)
    asked = requests()[:40]
    poison = replace(CASES["plain"], id="poison", prompt=POISON, max_tokens=100)
    found = await played(house, [*asked[:8], poison, *asked[8:]])
    end = told(found.pop("poison")).end
    assert end[0] is ReplicasFailed
    assert house.n_lost[True] == 2, "one death that makes it suspect, one that convicts it"
    await hold_against(engines[0], asked, found)


async def test_an_engine_that_stops_hands_over_what_it_has(engines: list[ThreadEngine]) -> None:
    """A drain whose time is over, of a real engine; last, as it takes one of them."""
    begun = asyncio.Event()

    def happened(run: Run) -> None:
        if run.n_deltas == 5 and run.chosen.local.engine is engines[2]:
            begun.set()

    house = House(engines, happened)
    asked = [replace(one, max_tokens=60) if one.grammar is None else one for one in requests()[:24]]

    async def stop() -> None:
        await begun.wait()
        await engines[2].drain(0.0)

    playing = asyncio.create_task(played(house, asked))
    await stop()
    found = await playing
    assert engines[2].status == "draining"
    assert house.n_lost == {True: 0, False: 1}
    assert all(isinstance(events[-2], Delta) for events in found.values())
    await hold_against(engines[0], asked, found)
