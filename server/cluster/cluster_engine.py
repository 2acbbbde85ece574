"""Many replicas as one engine: what the HTTP application of an ingress runs on.

Requests go to replicas and move between them; nothing else is kept here, so an ingress can be added or replaced at any
time. Its own streams end with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from slipstream.engine.api import AsyncEngine, Chat, ModelInfo, Prompt, Request, Status
from slipstream.engine.drafting import Drafting
from slipstream.engine.errors import DeviceLost, EngineStopped, Unsupported
from slipstream.engine.service.run.admission import Places
from slipstream.engine.settings import Settings
from slipstream.engine.stats import EngineStats
from slipstream.server.cluster import moving
from slipstream.server.cluster.merged_stats import merged
from slipstream.server.cluster.moving import MovingStream
from slipstream.server.cluster.placement import Members, Seeking, asked
from slipstream.server.cluster.runs import Runs
from slipstream.server.report.logs import logger

log = logger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_DRAIN_S = 0.1  # between two looks whether all streams have ended


class ClusterEngine:
    """Implements `engine.api.AsyncEngine`. Used on one event loop."""

    device_loss: DeviceLost | None = None
    step_age_s = 0.0  # steps are the replicas'

    def __init__(self, members: Members, runs: Runs, settings: Settings, most_moves: int) -> None:
        """runs: open. most_moves: times that a request may change its replica."""
        self.runs = runs
        self.n_queue = settings.max_queue  # places of a replica besides its slots
        self._seeking = Seeking(members, runs)
        self._settings = settings
        self._most_moves = most_moves
        self._one: ModelInfo | None = None  # of one replica, and of all
        self._all: ModelInfo | None = None
        self.status: Status = "loading"
        self._streams: list[MovingStream] = []
        self._n_placing: Counter[str] = Counter()  # by owner
        self._places = Places(1)
        self._there: set[str] = set()
        self._leaving: set[asyncio.Task[None]] = set()  # waits until leaving replicas have had their time

    def begin(self, info: ModelInfo) -> None:
        """The model is this; requests are taken from now on. info: a replica's."""
        self._one = self._all = info
        self._seeking.fingerprint = info.fingerprint
        self.status = "ready"

    @property
    def info(self) -> ModelInfo:
        """Of all replicas together where that is a number of slots or pages; the same object while it is the same."""
        assert self._one is not None
        assert self._all is not None
        n_slots = self.n_replicas * self._one.n_slots
        if self._all.n_slots != n_slots:
            self._all = replace(self._all, n_slots=n_slots, n_pages=self.n_replicas * self._one.n_pages)
        return self._all

    @property
    def n_replicas(self) -> int:
        """Those that take requests; one while there is none, as requests wait for it."""
        return max(1, len(self._there))

    async def submit(self, request: Request) -> MovingStream:
        self._check_open()
        if request.slot is not None:
            raise Unsupported(
                "id_slot", "slots belong to replicas here, which are chosen by what they have cached"
            )
        self._streams = [one for one in self._streams if not one.is_over]
        owner, settings = request.owner, self._settings
        self._places.n_places = self.info.n_slots + self.n_replicas * self.n_queue
        self._places.check(owner, self._n_placing + Counter(one.owner for one in self._streams))
        self._n_placing[owner] += 1
        try:
            stream = await moving.submit(
                self._seeking.place,
                request,
                self._most_moves,
                seed=settings.seed,
                request_timeout=settings.request_timeout,
            )
        finally:
            self._n_placing[owner] -= 1
        self._streams.append(stream)
        return stream

    def are_there(self, replicas: Collection[str]) -> None:
        """These take requests now. What runs at others and has the time ends there, the rest goes on elsewhere."""
        for name in self._there - set(replicas):
            log.info("replica_leaves", replica=name)
            task = asyncio.create_task(self._left(name))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        self._there = set(replicas)

    async def _left(self, replica: str) -> None:
        await asyncio.sleep(self._settings.shutdown_timeout)
        self.runs.lose(replica, "it stops", died=False)

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        return await self._asked(AsyncEngine.prompt_ids, prompt)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return await self._asked(
            AsyncEngine.tokenize, text, add_special=add_special, parse_special=parse_special
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._asked(AsyncEngine.detokenize, list(token_ids))

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return await self._asked(AsyncEngine.token_bytes, list(token_ids))

    async def render(self, chat: Chat) -> str:
        return await self._asked(AsyncEngine.render, chat)

    async def speculation(self) -> Drafting:
        """Of one replica: each measures its own costs."""
        return await self._asked(AsyncEngine.speculation)

    def stats(self) -> EngineStats:
        return merged(self.runs.stats)

    async def _refuse_slots(self, *arguments: Any, **named: Any) -> NoReturn:
        raise Unsupported("slot_save_path", "slots belong to replicas here and are not saved")

    save_slot = restore_slot = erase_slot = _refuse_slots

    async def drain(self, timeout_s: float) -> None:
        self.status = "draining"
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        while any(not one.is_over for one in self._streams) and loop.time() < ends_s:
            await asyncio.sleep(_DRAIN_S)
        await self._stop_all()

    async def close(self) -> None:
        self.status = "draining"
        for task in self._leaving:
            task.cancel()
        await self._stop_all()
        await self.runs.close()

    async def _stop_all(self) -> None:
        for stream in self._streams:
            await stream.stop(EngineStopped("the server is shutting down"))

    async def _asked(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """What this method of some replica's engine returns."""
        self._check_open()
        found: T = await asked(self._seeking.members, method.__name__, *arguments, **named)
        return found

    def _check_open(self) -> None:
        if self.status != "ready":
            raise EngineStopped("the server is shutting down")
