"""From engine streams to a reply: choices merged into one stream of events, as chunks or collected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from engine.api import AsyncEngine, Delta, Done, Event, EventStream, Failed
from engine.errors import ContextTooLong, EngineError
from server.errors import internal, problem_of
from server.logs import pairs
from server.openai.convert import Job
from server.openai.reply import DONE, Reply, event
from server.sse import close_all

log = logging.getLogger(__name__)


async def submit(engine: AsyncEngine, job: Job) -> list[EventStream]:
    """Admit every choice, or none: what can be refused is refused here, before the first byte."""
    streams: list[EventStream] = []
    try:
        for request in job.requests:
            streams.append(await engine.submit(request))  # noqa: PERF401 - those before a refusal must be closed
    except BaseException as error:
        await close_all(streams)
        if isinstance(error, ContextTooLong):
            error.param = job.form.prompt_field
        raise
    return streams


async def chunks(reply: Reply, streams: Sequence[EventStream]) -> AsyncIterator[bytes]:
    """The reply as server-sent events. An error here is an event too: the status has long been sent."""
    for chunk in reply.opening():
        yield chunk
    try:
        async with aclosing(_merged(streams)) as events:
            async for index, happened in events:
                if isinstance(happened, Delta):
                    yield reply.delta(index, happened)
                else:
                    for chunk in reply.end(index, _done(happened)):
                        yield chunk
        reply.check()
    except EngineError as error:
        log.warning("%s", pairs(event="failed", request_id=reply.job.request_id, error=error))
        yield event(problem_of(error).content())
    except Exception:
        log.exception("%s", pairs(event="unexpected", request_id=reply.job.request_id))
        yield event(internal().content())
    yield DONE


async def collect(reply: Reply, streams: Sequence[EventStream]) -> bytes:
    """The reply in one piece. Raises what a choice failed with."""
    async with aclosing(_merged(streams)) as events:
        async for index, happened in events:
            reply.keep(index, happened if isinstance(happened, Delta) else _done(happened))
    return reply.whole()


def _done(happened: Done | Failed) -> Done:
    if isinstance(happened, Failed):
        raise happened.error
    return happened


async def _merged(streams: Sequence[EventStream]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all choices as they come. At most one per choice waits here: a slow reader holds back."""
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
        # A stream may be closed only when nobody waits for its next event any more.
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: EventStream) -> Event | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None
