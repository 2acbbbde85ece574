"""Requests that survive their replicas.

A text is a function of model, prompt, sampling and seed, so any replica goes on with any reply where another stopped,
token for token: it is given the tokens that the client has (`Request.emitted`). The client notices a pause. Knows
nothing of how replicas are reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from slipstream.engine.api import Delta, Done, Event, EventStream, Failed, Request
from slipstream.engine.errors import EngineError, EngineStopped, Overloaded, ReplicasFailed, TimedOut
from slipstream.server.cluster.delivered import Delivered
from slipstream.server.report.logs import logger
from slipstream.server.report.meter import record

log = logger(__name__)

# Tokens after which a request that runs alone is not the cause of the death that it was there for: more than a replica
# can have made without anybody having seen them.
_HARMLESS = 32
_PATIENCE_S = 120.0  # that a request which has begun waits for a place at replicas whose queues are full


class ReplicaLost(EngineStopped):
    """The replica drains, was scaled away, or died; what ran on it can go on elsewhere.

    died: its process, or its engine, ended by itself while the request was there, so the request may be the cause. Not
    of a replica that was dead before it was asked.
    """

    def __init__(self, reason: str, replica: str = "", *, died: bool = True) -> None:
        """replica: its name, if it is known."""
        super().__init__(reason)
        self.replica = replica
        self.died = died


class Run(EventStream, Protocol):
    """A request at one replica. `__anext__` raises `ReplicaLost`, also if the engine stops."""

    replica: str  # its name

    def trust(self) -> None:
        """Others may run beside the request, which had the replica to itself. Called once at most, while it runs."""
        ...


class Place(Protocol):
    """All replicas have the same model and the same settings; one that comes back has another name."""

    async def __call__(self, request: Request, avoid: Collection[str], *, alone: bool) -> Run:
        """Submit a request to some replica; waits, within bounds, until there is one, then raises `Overloaded`.

        avoid: names of those that it was lost on. alone: nothing else may run there before this has failed, the run has
        ended, was closed or lost, or `Run.trust` is called. Raises like `AsyncEngine.submit`, and `ReplicaLost`.
        """
        ...


async def submit(
    place: Place,
    request: Request,
    most_moves: int,
    *,
    seed: int | None = None,
    request_timeout: float = 0.0,
) -> MovingStream:
    """A request's events, from as many replicas as it takes. Raises like `AsyncEngine.submit`, and `ReplicasFailed`.

    most_moves: times that it may change its replica. seed: the replicas' own (`--seed`), for requests without one;
    None: each would draw its own, so one is drawn here. request_timeout: seconds for all runs together; 0: no limit.
    """
    if request.sampling.seed is None:
        drawn = secrets.randbits(63) if seed is None else seed
        request = replace(request, sampling=replace(request.sampling, seed=drawn))
    stream = MovingStream(place, request, most_moves, request_timeout)
    await stream.admitted()
    return stream


class MovingStream:
    """Implements `engine.api.EventStream`. `submit` makes it. Used on one event loop.

    Where a replica dies, what ran there is suspect, and goes on alone. A suspect on whose replica the same happens
    again is failed; one that has written enough there is a request like others again.
    """

    def __init__(self, place: Place, request: Request, most_moves: int, request_timeout: float) -> None:
        self.prompt_ids: Sequence[int] = ()
        self.prompt_tail = ""
        self.n_moves = 0
        self._place = place
        self._request = request
        self._most_moves = most_moves
        self._limit_s = request_timeout
        self._now = asyncio.get_running_loop().time
        self._ends_s = self._now() + request_timeout if request_timeout else None
        self._timeout = asyncio.timeout(None)  # of the event that is awaited, or was last
        self._delivered = Delivered(self._now())
        self._run: Run | None = None  # None: between two runs
        self._lost_on: set[str] = set()
        # A death's suspect, until it has written this many tokens in all, alone.
        self._n_harmless: int | None = None
        self._is_finishing = False
        self._is_over = False
        self._problem: EngineError | None = None  # why it goes on nowhere

    async def admitted(self) -> None:
        """Find the first replica. Raises `EngineError`, as `submit` of this module."""
        try:
            async with asyncio.timeout_at(self._ends_s):
                await self._current()
        except TimeoutError:
            raise TimedOut(self._limit_s) from None

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def owner(self) -> str:
        return self._request.owner

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._is_over:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout_at(self._ends_s) as self._timeout:
                event = await self._next()
        except TimeoutError:
            await self._leave()
            event = Failed(self._problem or TimedOut(self._limit_s))
        except EngineError as error:
            event = Failed(error)
        self._is_over = isinstance(event, Done | Failed)
        return event

    def finish(self) -> None:
        if self._delivered.token_ids:
            self._is_finishing = True
        if self._run is not None:
            self._run.finish()

    async def stop(self, error: EngineError) -> None:
        """Stop the request wherever it is; what is read next is this error, if it is not finished."""
        self._problem = error
        await self._leave()
        with contextlib.suppress(RuntimeError):  # nobody awaits an event
            self._timeout.reschedule(self._now())

    async def aclose(self) -> None:
        """Stop the request wherever it is. That its replica is lost is as good."""
        if not self._is_over:
            self._is_over = True
            await self._leave()

    async def _next(self) -> Event:
        """The next event that the client has not had. Raises `EngineError` if the request goes on nowhere."""
        while True:
            run = await self._current()
            try:
                event = await anext(run)
            except ReplicaLost as lost:
                self._lose(lost)
                continue
            new = self._delivered.new(event, self._now())
            self._judge()
            if self._is_finishing and isinstance(event, Delta):
                run.finish()  # this run may have begun after it was asked to
            if new is not None:
                return new

    async def _current(self) -> Run:
        """The current run; a new one if there is none. May be cancelled and called again."""
        waits_until_s = self._now() + _PATIENCE_S
        while self._run is None:
            if self._problem is not None:
                raise self._problem
            try:
                await self._begin()
            except ReplicaLost as lost:
                self._lose(lost)
            except Overloaded as error:
                if not self.prompt_ids or self._now() >= waits_until_s:
                    raise
                await asyncio.sleep(error.retry_after_s)
        return self._run

    async def _begin(self) -> None:
        """Start a run. Raises what `Place` raises."""
        is_suspect = self._n_harmless is not None
        request = self._request
        if self.n_moves:
            request = self._delivered.going_on(request, self.prompt_ids, self._now())
        self._run = run = await self._place(request, self._lost_on, alone=is_suspect)
        record().replicas += (run.replica,)
        if not self.prompt_ids:
            self.prompt_ids, self.prompt_tail = run.prompt_ids, run.prompt_tail
        if is_suspect:
            self._n_harmless = len(self._delivered.token_ids) + _HARMLESS

    def _lose(self, lost: ReplicaLost) -> None:
        """The current run is over; `_problem` says if that was the last."""
        name, request_id = lost.replica, self._request.id
        was_alone = self._n_harmless is not None
        self._run = None
        self._lost_on.add(name)
        self.n_moves += 1
        if lost.died and was_alone:
            log.error("request_kills_replicas", request=request_id, replica=name, reason=str(lost))
            self._problem = ReplicasFailed("the request has ended a replica on which nothing else ran")
        elif self.n_moves > self._most_moves:
            log.error("request_moved_too_often", request=request_id, moves=self._most_moves)
            self._problem = ReplicasFailed(f"the request has lost {self.n_moves} replicas; --max-moves")
        else:
            n_tokens = len(self._delivered.token_ids)
            log.warning("request_moves", request=request_id, replica=name, tokens=n_tokens, reason=str(lost))
        if lost.died:
            self._n_harmless = 0

    def _judge(self) -> None:
        """A suspect that has written enough alone is none any more."""
        if self._n_harmless is None or len(self._delivered.token_ids) < self._n_harmless:
            return
        self._n_harmless = None
        if self._run is not None:
            self._run.trust()

    async def _leave(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            await run.aclose()
        except ReplicaLost as lost:
            log.info("replica_lost_while_leaving", request=self._request.id, reason=str(lost))
