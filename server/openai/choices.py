"""From the engine's streams, one per choice, to a reply: server-sent events as they come, or a collected body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace

from slipstream.engine.api import (
    AsyncEngine,
    Delta,
    Done,
    Event,
    EventStream,
    Failed,
    ModelInfo,
    Progress,
)
from slipstream.engine.errors import ContextTooLong, EngineError, EngineFault
from slipstream.server.http.error_table import Refused, problem_of
from slipstream.server.http.sse import close_all
from slipstream.server.openai.job import Job, Reply
from slipstream.server.report.logs import logger
from slipstream.server.report.meter import record

log = logger(__name__)


async def submit(engine: AsyncEngine, job: Job) -> list[EventStream]:
    """Admit every choice, or none: what can be refused is refused here, before the first byte of the reply.

    Raises what `AsyncEngine.submit` raises.
    """
    streams: list[EventStream] = []
    try:
        with naming_prompt(job):
            for request in job.requests:
                streams.append(await engine.submit(request))  # noqa: PERF401 - those before a refusal must be closed
    except BaseException:
        await close_all(streams)
        raise
    return streams


@contextmanager
def naming_prompt(job: Job) -> Iterator[None]:
    """A prompt that is too long is refused under the name that it has in the request."""
    try:
        yield
    except ContextTooLong as error:
        error.param = job.form.prompt_field
        raise


def begun(job: Job, info: ModelInfo, streams: Sequence[EventStream]) -> Reply:
    """The reply of an admitted job, noted in the request's record."""
    one = record()
    one.model, one.reply_id, one.n_choices, one.n = info.name, job.id, len(job.requests), job.n
    return job.form.reply(job, info, streams)


async def chunks(reply: Reply, streams: Sequence[EventStream]) -> AsyncIterator[bytes]:
    """The reply as server-sent events. An error here is an event too: the status has been sent already."""
    for chunk in reply.opening():
        yield chunk
    ends: dict[int, Done] = {}
    try:
        async with aclosing(_wanted(reply, streams)) as events:
            async for index, happened in events:
                if isinstance(happened, Done | Failed):
                    ends[index] = _done(happened)
                    _record(ends, streams)
                    made = reply.end(index, ends)
                else:
                    made = reply.piece(index, happened)
                for chunk in made:
                    yield chunk
        _check(ends, streams)
    except Exception as error:  # noqa: BLE001 - `failure` logs it
        yield reply.failed(failure(error))
    if reply.closing:
        yield reply.closing


def failure(error: Exception) -> Refused:
    """The error of a reply that was under way, noted in the log and in the request's record."""
    if not isinstance(error, EngineError):
        log.exception("unexpected")
    elif not isinstance(error, EngineFault):  # the engine has logged those
        log.warning("failed", error=str(error))
    problem = problem_of(error)
    record().code = problem.code
    return problem


async def collect(reply: Reply, streams: Sequence[EventStream]) -> bytes:
    """The whole reply as a JSON body. Raises the error with which a choice failed."""
    ends: dict[int, Done] = {}
    async with aclosing(_wanted(reply, streams)) as events:
        async for index, happened in events:
            if isinstance(happened, Done | Failed):
                ends[index] = _done(happened)
            elif not isinstance(happened, Progress):
                reply.keep(index, happened)
    _check(ends, streams)
    _record(ends, streams)
    return reply.whole([ends[index] for index in range(len(ends))])


def _check(ends: Mapping[int, Done], streams: Sequence[EventStream]) -> None:
    """Raises `EngineFault` unless every choice has ended: a stream that just stops must not pass for a success."""
    if len(ends) < len(streams):
        raise EngineFault("an event stream ended without Done or Failed")


def _record(ends: Mapping[int, Done], streams: Sequence[EventStream]) -> None:
    """Note the ends for the access line and the metrics, once all choices have ended."""
    if len(ends) == len(streams):
        record().ends = [ends[index] for index in range(len(ends))]


def _done(happened: Done | Failed) -> Done:
    if isinstance(happened, Failed):
        raise happened.error
    return happened


async def _wanted(reply: Reply, streams: Sequence[EventStream]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all choices. A choice whose further text would not be sent (`is_ended`) is asked to finish.

    How far it comes until then depends on drafts and load; what it meets there, a limit or a stop string, is not told.
    """
    async with aclosing(_merged(streams)) as events:
        async for index, happened in events:
            if isinstance(happened, Delta) and reply.is_ended(index):
                streams[index].finish()
                continue
            if isinstance(happened, Done) and reply.is_ended(index):
                happened = replace(happened, reason="stop", stop_string=None, stop_token=None)
            yield index, happened


async def _merged(streams: Sequence[EventStream]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all choices as they come. At most one per choice waits here: a slow reader holds the streams back."""
    if len(streams) == 1:
        async for only in streams[0]:
            yield 0, only
        return
    waiting = {asyncio.create_task(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(ready, key=lambda one: waiting[one]):
                index = waiting.pop(task)
                happened = task.result()
                if happened is not None:
                    yield index, happened
                    waiting[asyncio.create_task(_next(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        # A stream may be closed only when no task waits for its next event.
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: EventStream) -> Event | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None
