"""Where a request runs: a replica is sought until one has begun it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextvars import Context
from typing import Any, Protocol

from slipstream.engine.api import Request
from slipstream.engine.errors import EngineError, Overloaded
from slipstream.server.cluster.moving import ReplicaLost
from slipstream.server.cluster.run_frames import Assignment, Ending
from slipstream.server.cluster.runs import Run, Runs
from slipstream.server.report.logs import logger

log = logger(__name__)

PATIENCE_S = 120.0  # that a request waits for a replica that takes it
_AGAIN_S = 0.02  # between two tries
_BUSY_S = 0.25  # that a replica is left alone which has refused
_WORD_S = 1.0  # that what a replica said before its end may be on its way
_MOST_TRIES = 8  # of a question; some five seconds
_RETRY_AFTER_S = 1.0


class Members(Protocol):
    """The replicas, as whoever starts and stops them knows them."""

    async def run(self, assignment: Assignment, avoid: Collection[str]) -> Ending:
        """Have one of them run it, another than those in `avoid` if there is any; returns when that is over.

        Raises `Overloaded` if none takes it now; any other exception says that the replica, or the way to it, is lost.
        """
        ...

    async def ask(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """What a method of some replica's engine returns. Raises `EngineError`; anything else as `run`."""
        ...


class Seeking:
    """How replicas are found for all requests of an ingress."""

    def __init__(self, members: Members, runs: Runs) -> None:
        self.members = members
        self.runs = runs
        self.fingerprint = ""  # of the model that all requests want
        self._busy: dict[str, float] = {}  # replicas, and until when they are busy, on the loop's clock

    async def place(self, request: Request, avoid: Collection[str], *, alone: bool) -> Run:
        """Implements `moving.Place`: tries replicas until one has begun the request.

        What ends before has not cost it a move.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (run := await self._try(request, avoid, alone=alone)) is None:
                    await asyncio.sleep(_AGAIN_S)
                return run
        except TimeoutError:
            reason = f"no replica has taken the request within {PATIENCE_S:g} s"
            raise Overloaded(reason, _RETRY_AFTER_S) from None

    async def _try(self, request: Request, avoid: Collection[str], *, alone: bool) -> Run | None:
        """The run, if a replica has it now. Raises as `moving.Place`; of what has not begun a loss is no loss."""
        run = self.runs.new(request.id)
        call = self._called(run, request, avoid, alone=alone)
        try:
            await _either(run, call)
            if run.admitted.done():
                run.admitted.result()
                call.add_done_callback(lambda call: _over(call, run))
                return run
            self._note(call, request)
        except ReplicaLost as lost:
            if lost.died:
                raise
        except BaseException:
            await run.aclose()
            call.cancel()
            raise
        self.runs.drop(run)
        return None

    def _called(
        self, run: Run, request: Request, avoid: Collection[str], *, alone: bool
    ) -> asyncio.Task[Ending]:
        assignment = Assignment(
            run.name, request, self.runs.address, self.runs.word, self.fingerprint, alone=alone
        )
        # In a context of its own: Ray takes calls of one context for one request's.
        call = asyncio.create_task(
            self.members.run(assignment, {*avoid, *self._now_busy()}), context=Context()
        )
        call.add_done_callback(_error_of)  # an exception that nobody looks at would be logged
        return call

    def _note(self, call: asyncio.Task[Ending], request: Request) -> None:
        """The call is over and nothing has begun. Raises `Overloaded`."""
        error = _error_of(call)
        if isinstance(error, Overloaded):
            raise error
        if error is not None:
            log.info("replica_not_reached", request=request.id, reason=str(error)[:300])
        elif (ending := _ending_of(call)) is not None:
            self._busy[ending.replica] = asyncio.get_running_loop().time() + _BUSY_S

    def _now_busy(self) -> set[str]:
        """Replicas that have refused a moment ago."""
        now_s = asyncio.get_running_loop().time()
        self._busy = {name: until_s for name, until_s in self._busy.items() if until_s > now_s}
        return set(self._busy)


async def asked(members: Members, verb: str, *arguments: Any, **named: Any) -> Any:
    """As `Members.ask`, of another replica where one is lost: what can be asked changes nothing."""
    n_tries = 0
    while True:
        try:
            return await members.ask(verb, *arguments, **named)
        except EngineError:
            raise
        except Exception as error:
            n_tries += 1
            log.info("replica_not_reached", verb=verb, reason=str(error)[:300])
            if n_tries == _MOST_TRIES:
                reason = f"no replica has answered in {n_tries} tries"
                raise Overloaded(reason, _RETRY_AFTER_S) from error
            await asyncio.sleep(_AGAIN_S * 2**n_tries)


async def _either(run: Run, call: asyncio.Task[Ending]) -> None:
    """Wait until the run is admitted or refused, or the call is over without that."""
    waited: set[asyncio.Future[Any]] = {call, run.admitted}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    is_refusal = call.done() and (ending := _ending_of(call)) is not None and ending.outcome != "over"
    if not run.admitted.done() and not is_refusal:
        # What the replica said before its end comes another way.
        await asyncio.wait({run.admitted}, timeout=_WORD_S)


def _over(call: asyncio.Task[Ending], run: Run) -> None:
    """The replica's part of an admitted run is over."""
    if (error := _error_of(call)) is not None:
        run.lose(str(error)[:300], died=True)


def _ending_of(call: asyncio.Task[Ending]) -> Ending | None:
    return None if call.cancelled() or call.exception() is not None else call.result()


def _error_of(call: asyncio.Task[Ending]) -> BaseException | None:
    return None if call.cancelled() else call.exception()
