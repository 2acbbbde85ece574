"""Engines of this process as replicas of a cluster, over real connections: everything but Ray."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.settings import Settings
from slipstream.server.cluster.cluster_engine import ClusterEngine
from slipstream.server.cluster.hosting import Host
from slipstream.server.cluster.run_frames import Assignment, Ending
from slipstream.server.cluster.runs import Runs

PLACE_S = 0.01  # between two looks for a replica


class Died(Exception):
    """What Ray raises to those who wait for a replica's answer."""


class Hosts:
    """Implements `placement.Members`: a replica for each engine; one that dies comes back under a new name."""

    def __init__(self, engines: Sequence[ThreadEngine]) -> None:
        self.draw = random.Random(0)
        self.there: dict[str, Host] = {}
        self.n_died = 0
        self.n_bounced = 0
        self.n_alone: Counter[str] = Counter()  # at each: requests that run alone, or wait for that
        self._dying: dict[str, asyncio.Event] = {}
        self._n = 0
        for one in engines:
            self.add(one)

    def add(self, engine: ThreadEngine) -> None:
        name = f"replica-{self._n}"
        self._n += 1
        self.there[name] = Host(engine, name)
        self._dying[name] = asyncio.Event()

    async def run(self, assignment: Assignment, avoid: Collection[str]) -> Ending:
        while not self.there:
            await asyncio.sleep(PLACE_S)
        allowed = [name for name in self.there if name not in avoid] or list(self.there)
        name = self.draw.choice(allowed)
        self.n_alone[name] += assignment.alone
        running = asyncio.create_task(self.there[name].run(assignment))
        dying = asyncio.create_task(self._dying[name].wait())
        try:
            await asyncio.wait({running, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise Died(name)
            ending = running.result()
        finally:
            self.n_alone[name] -= assignment.alone
            running.cancel()
            dying.cancel()
        self.n_bounced += ending.outcome != "over"
        return ending

    async def ask(self, verb: str, *arguments: Any, **named: Any) -> Any:
        host = next(iter(self.there.values()))
        return await getattr(host.engine, verb)(*arguments, **named)

    async def kill(self, name: str) -> None:
        """The replica's process is gone; another begins on the same engine."""
        host = self.there.pop(name)
        self.n_died += 1
        await host.close()
        self._dying[name].set()
        assert isinstance(host.engine, ThreadEngine)
        self.add(host.engine)


@asynccontextmanager
async def cluster(
    engines: Sequence[ThreadEngine], most_moves: int
) -> AsyncIterator[tuple[ClusterEngine, Hosts]]:
    """An ingress' engine before these."""
    hosts, runs = Hosts(engines), Runs()
    await runs.open("127.0.0.1")
    engine = ClusterEngine(hosts, runs, Settings(model="none", shutdown_timeout=0), most_moves)
    engine.begin(engines[0].info)
    engine.are_there(list(hosts.there))
    try:
        yield engine, hosts
    finally:
        await engine.close()
        for host in hosts.there.values():
            await host.close()
