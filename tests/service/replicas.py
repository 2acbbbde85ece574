"""Engines of this process as replicas that die, drain and come back under new names, as a cluster's do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from slipstream.engine.api import Delta, Done, Event, EventStream, Failed, Request
from slipstream.engine.errors import EngineStopped
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.server.cluster.moving import ReplicaLost

LIMIT_S = 120.0


@dataclass(eq=False)
class Local:
    """One engine under one name."""

    name: str
    engine: ThreadEngine
    guests: set[Chosen] = field(default_factory=set)
    lost: ReplicaLost | None = None
    is_held: bool = False  # by a request that runs alone


@dataclass(eq=False)
class Chosen:
    """A request that looks for a replica, or has one."""

    house: House
    avoid: Collection[str]
    alone: bool
    local: Local = field(init=False)  # once `submit` has found it

    @property
    def name(self) -> str:
        return self.local.name

    async def submit(self, request: Request) -> Run:
        self.local = await self.house.room(self)
        try:
            # Here an engine may still have an event for the run that it was left by a moment ago, under another name.
            stream = await self.local.engine.submit(replace(request, id=f"{request.id}@{self.name}"))
        except EngineStopped as error:
            self.over()
            raise ReplicaLost(str(error), self.name, died=False) from error
        except BaseException:
            self.over()
            raise
        assert not self.alone or self.local.guests == {self}
        return Run(stream, self, request)

    def trust(self) -> None:
        assert self.alone
        self._share()

    def over(self) -> None:
        self.local.guests.discard(self)
        self._share()

    def _share(self) -> None:
        if self.alone:
            self.local.is_held, self.alone = False, False
        self.house.changed()


@dataclass(eq=False)
class Run:
    """Implements `moving.Run`: an engine's stream until its replica is lost."""

    stream: EventStream
    chosen: Chosen
    request: Request
    n_deltas: int = 0

    @property
    def replica(self) -> str:
        return self.chosen.name

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.stream.prompt_ids

    @property
    def prompt_tail(self) -> str:
        return self.stream.prompt_tail

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        local, house = self.chosen.local, self.chosen.house
        if local.lost is None:
            event = await anext(self.stream)
            self.n_deltas += isinstance(event, Delta)
            if isinstance(event, Done):
                self.chosen.over()
                return event
            if isinstance(event, Failed) and isinstance(event.error, EngineStopped):
                house.lose(local, ReplicaLost(str(event.error), died=False))
            else:
                house.happened(self)
        if local.lost is not None:  # the event is lost with it
            await self.aclose()
            raise local.lost
        return event

    def finish(self) -> None:
        self.stream.finish()

    def trust(self) -> None:
        self.chosen.trust()

    async def aclose(self) -> None:
        self.chosen.over()
        await self.stream.aclose()


class House:
    """Implements `moving.Place`. What is lost comes back under another name, unless its engine has stopped."""

    def __init__(self, engines: Sequence[ThreadEngine], happened: Callable[[Run], None]) -> None:
        """happened: is called after each event but a request's last, which is lost if it loses the replica."""
        self.there = [Local(f"replica-{i}", engine) for i, engine in enumerate(engines)]
        self.happened = happened
        self.n_lost = {True: 0, False: 0}  # by whether it died
        self.n_alone = 0
        self._draw = random.Random(0)
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def lose(self, local: Local, lost: ReplicaLost) -> None:
        if local.lost is not None:
            return
        local.lost, lost.replica = lost, local.name
        self.n_lost[lost.died] += 1
        self.there.remove(local)
        if local.engine.status == "ready":
            self.there.append(Local(f"replica-{2 + sum(self.n_lost.values())}", local.engine))
        self.changed()

    async def __call__(self, request: Request, avoid: Collection[str], *, alone: bool) -> Run:
        return await Chosen(self, avoid, alone).submit(request)

    async def room(self, chosen: Chosen) -> Local:
        """Where it runs, with it as a guest."""
        avoid, alone = chosen.avoid, chosen.alone
        async with asyncio.timeout(LIMIT_S):
            while True:
                free = [
                    one
                    for one in self.there
                    if one.name not in avoid and not one.is_held and not (alone and one.guests)
                ]
                if free:
                    local = self._draw.choice(free)
                    local.is_held = alone
                    self.n_alone += alone
                    local.guests.add(chosen)
                    return local
                if alone and not any(one.is_held for one in self.there):
                    # Room is made as a replica makes it that leaves: what runs there goes on elsewhere.
                    self.lose(self.there[0], ReplicaLost("makes room", died=False))
                    continue
                await self._changed.wait()
