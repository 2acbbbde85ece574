"""What the routes that read a request body share, whatever their dialect: from the body to a job, and from a job to a
response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.api import AsyncEngine
from slipstream.engine.errors import ContextTooLong, EngineError
from slipstream.engine.settings import Settings
from slipstream.server.http.auth import tenant_of
from slipstream.server.http.body import answer_json, checked, read_json
from slipstream.server.http.error_table import Refused, renamed
from slipstream.server.http.gate import Gate
from slipstream.server.http.sse import CLIENT_LEFT, Events, close_all, unless_gone
from slipstream.server.images.image_part import Placed
from slipstream.server.images.looking import Looking
from slipstream.server.openai.choices import begun, chunks, collect, submit
from slipstream.server.openai.convert import Caller
from slipstream.server.openai.formats.reading import Knowing
from slipstream.server.openai.job import Job
from slipstream.server.openai.structured import translate
from slipstream.server.openai.wire import Generate

Model = TypeVar("Model", bound=Generate)
Convert = Callable[[Model, Caller], Job]


@dataclass(frozen=True, slots=True)
class Serving:
    """The gate to the engine, the settings, what is known of the model's format, and what reads images."""

    gate: Gate
    settings: Settings
    knowing: Knowing
    looking: Looking

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The body as a validated wire model. Raises `Refused`."""
        strict = self.settings.strict_api
        return await read_json(request, lambda data: checked(model, model.prepared(data), strict=strict))

    async def job(
        self, engine: AsyncEngine, request: Request, model: type[Model], convert: Convert[Model]
    ) -> Job:
        return await self.converted(engine, request, await self.read(request, model), convert)

    async def converted(
        self, engine: AsyncEngine, request: Request, wire: Model, convert: Convert[Model]
    ) -> Job:
        """The job of a body that is read already. Raises `Refused`, `Overloaded`."""
        await translate(wire)
        return convert(wire, await self.caller(engine, request, tuple(wire.images())))

    async def caller(self, engine: AsyncEngine, request: Request, placed: Sequence[Placed]) -> Caller:
        """placed: the images that the request shows, which are read. Raises `Refused`, `Overloaded`."""
        return Caller(
            request_id=request.state.request_id,
            tenant=tenant_of(request),
            settings=self.settings,
            info=engine.info,
            known=await self.knowing.of(engine),
            images=await self.looking.at(placed, engine.info),
        )

    async def reply(self, request: Request, model: type[Model], convert: Convert[Model]) -> Response:
        engine = self.gate.for_work()
        return await self.answer(request, engine, await self.job(engine, request, model, convert))

    async def answer(self, request: Request, engine: AsyncEngine, job: Job) -> Response:
        """Run the job: as a stream, or whole unless the client leaves first."""
        if job.stream:
            streams = await submit(engine, job)
            reply = begun(job, engine.info, streams)
            return Events(chunks(reply, streams), streams, grace_s=self.settings.shutdown_timeout)

        async def whole() -> bytes:
            streams = await submit(engine, job)
            try:
                return await collect(begun(job, engine.info, streams), streams)
            finally:
                await close_all(streams)

        body = await unless_gone(request, whole())
        if body is None:
            return Response(status_code=CLIENT_LEFT)
        return Response(body, media_type="application/json")

    async def count(self, request: Request, model: type[Model], convert: Convert[Model]) -> Response:
        """Answer with the number of prompt tokens of a request, each prompt once, without generating."""
        engine = self.gate.for_work()
        job = await self.job(engine, request, model, convert)
        return answer_json({"object": "response.input_tokens", "input_tokens": await n_prompt(engine, job)})


async def n_prompt(engine: AsyncEngine, job: Job) -> int:
    """The prompt tokens of a job, each prompt once; more than fit are counted too. Raises `RequestError`."""
    n = 0
    for prompt in job.prompts:
        try:
            n += len(await engine.prompt_ids(prompt))
        except ContextTooLong as error:
            n += error.n_prompt
    return n


async def in_names(names: Mapping[str, str], work: Awaitable[Response]) -> Response:
    """The response of `work`, whose errors name fields of a chat or completion. `names`: what they are called here."""
    try:
        return await work
    except (Refused, EngineError) as error:
        raise renamed(error, names) from None
