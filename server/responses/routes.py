"""`/v1/responses`: make a response, and read, cancel, delete or list what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.api import AsyncEngine, EventStream
from slipstream.server.describe.openapi import GENERATE, WORK, answers, asks, takes
from slipstream.server.http.auth import tenant_of
from slipstream.server.http.body import answer_json
from slipstream.server.http.error_table import bad_field, bad_request, not_found, unsupported
from slipstream.server.http.sse import close_all
from slipstream.server.openai.choices import begun, collect, failure, submit
from slipstream.server.openai.job import Form, Job
from slipstream.server.openai.replies import InputTokens
from slipstream.server.openai.serving import Serving, in_names, n_prompt
from slipstream.server.openai.structured import translate
from slipstream.server.report.meter import record
from slipstream.server.responses import replies
from slipstream.server.responses.conversation import before, fitting, resolved, response_job
from slipstream.server.responses.input_items import images_of
from slipstream.server.responses.kept import Kept, KeptResponses
from slipstream.server.responses.response import PREFIX, ResponseReply
from slipstream.server.responses.wire import ResponsesRequest

# Fields of a chat by which errors would be named otherwise.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
MOST_LISTED = 100
_EXAMPLE = {"input": "Write the docstring:\n\ndef f(x): ...", "max_output_tokens": 16}
CREATE: Any = {
    "summary": "Make a response, which may go on from an earlier one",
    "responses": answers(replies.Response, *GENERATE, 404, event=replies.ResponseEvent, is_named=True),
    "openapi_extra": takes(ResponsesRequest, example=_EXAMPLE),
}
COUNT: Any = {
    "summary": "The tokens that a response's input would be",
    "responses": answers(InputTokens, *WORK, 404, 429),
    "openapi_extra": takes(ResponsesRequest, example=_EXAMPLE),
}
PAGE = asks(
    limit=("items of a page", {"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": 20}),
    order=("the newest first, or the oldest", {"type": "string", "enum": ["desc", "asc"]}),
    after=("the id of the last item of the page before", {"type": "string"}),
)
ResponseId = Annotated[str, Path(description="the response's `id`")]


class Running(NamedTuple):
    """A response that is being made in the background."""

    reply: ResponseReply
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class Responses:
    """What the routes share: kept responses, and those made in the background that have not ended."""

    serving: Serving
    kept: KeptResponses
    running: dict[tuple[str, str], Running] = field(default_factory=dict)

    async def job(self, engine: AsyncEngine, request: Request, wire: ResponsesRequest) -> Job:
        """The job of a request, with the conversation before it. Raises `Refused`."""
        await translate(wire)
        tenant = tenant_of(request)
        own = await resolved(wire, self.kept, tenant)
        is_kept = wire.store is not False and self.kept.most > 0

        def keep(body: dict[str, Any], given: Sequence[dict[str, Any]]) -> None:
            self.kept.put(tenant, Kept(wire.previous_response_id, given, body))

        reply = partial(ResponseReply, wire=wire, items=own, keep=keep if is_kept else None)
        self.check_ended(tenant, wire.previous_response_id, "previous_response_id")
        earlier = await before(wire, self.kept, tenant)
        placed = (*images_of(earlier, "previous_response_id"), *images_of(own))
        caller = await self.serving.caller(engine, request, placed)
        items = [*earlier, *own]
        make = partial(response_job, wire, caller=caller, form=Form(PREFIX, "input", reply))
        if wire.truncation == "auto":
            return await fitting(engine, items, wire.max_output_tokens or 0, make)
        return make(items)

    async def start(self, engine: AsyncEngine, job: Job) -> dict[str, Any]:
        """Make a response in the background. Returns it as it is now. Raises what `submit` raises."""
        streams = await submit(engine, job)
        reply = begun(job, engine.info, streams)
        assert isinstance(reply, ResponseReply)
        key = job.requests[0].owner, job.id
        record().background = task = asyncio.create_task(self._run(reply, streams))
        self.running[key] = Running(reply, task)
        task.add_done_callback(lambda _: self.running.pop(key))
        return reply.response

    async def _run(self, reply: ResponseReply, streams: Sequence[EventStream]) -> None:
        try:
            await collect(reply, streams)
        except asyncio.CancelledError:
            reply.cancel()
        except Exception as error:  # noqa: BLE001 - `failure` logs it
            reply.fail(failure(error))
        finally:
            await close_all(streams)

    async def find(self, request: Request, response_id: str) -> Kept:
        """A kept response, or a running response as it is now. Raises `Refused`."""
        key = tenant_of(request), response_id
        if key in self.running:
            running = self.running[key]
            return Kept(None, running.reply.input, running.reply.response)
        found = await self.kept.get(*key)
        if found is None:
            raise not_found("no response of this id is kept", code="response_not_found", param="response_id")
        return found

    def check_ended(self, tenant: str, response_id: str | None, param: str) -> None:
        """Raises `Refused` for a response that is still being made."""
        if (tenant, response_id) in self.running:
            raise bad_field(param, "the response is still being made")

    async def cancel(self, request: Request, response_id: str) -> dict[str, Any]:
        """Cancel a response made in the background; one that has ended stays as it is. Raises `Refused`."""
        key = tenant_of(request), response_id
        if key in self.running:
            running = self.running[key]
            running.task.cancel()
            await asyncio.wait([running.task])
            return running.reply.response
        found = await self.find(request, response_id)
        if not found.body["background"]:
            message = "response_id: only responses with background can be cancelled; others end with their connection"
            raise bad_request(message, param="response_id")
        return found.body


def routes(serving: Serving, kept: KeptResponses) -> APIRouter:
    router = APIRouter()
    responses = Responses(serving, kept)
    _add_making(router, responses)
    _add_keeping(router, responses)
    return router


def _add_making(router: APIRouter, responses: Responses) -> None:
    serving = responses.serving

    async def made(request: Request) -> Response:
        engine = serving.gate.for_work()
        wire = await serving.read(request, ResponsesRequest)
        _check(wire, responses.kept)
        job = await responses.job(engine, request, wire)
        if wire.background:
            return answer_json(await responses.start(engine, job))
        return await serving.answer(request, engine, job)

    async def counted(request: Request) -> Response:
        engine = serving.gate.for_work()
        wire = await serving.read(request, ResponsesRequest)
        job = await responses.job(engine, request, wire)
        return answer_json({"object": "response.input_tokens", "input_tokens": await n_prompt(engine, job)})

    @router.post("/responses", **CREATE)
    @router.post("/v1/responses", **CREATE)
    async def create(request: Request) -> Response:
        return await in_names(NAMES, made(request))

    @router.post("/responses/input_tokens", **COUNT)
    @router.post("/v1/responses/input_tokens", **COUNT)
    async def count(request: Request) -> Response:
        return await in_names(NAMES, counted(request))


def _check(wire: ResponsesRequest, kept: KeptResponses) -> None:
    """Raises `Refused` for a request that wants to be kept in a way that is not possible."""
    if wire.background and wire.stream:
        raise unsupported("background", "cannot be combined with stream")
    if wire.background and (wire.store is False or not kept.most):
        raise bad_field("background", "needs store, and --responses-kept above 0")


def _add_keeping(router: APIRouter, responses: Responses) -> None:
    @router.get(
        "/v1/responses/{response_id}",
        summary="A kept response, or one that is being made in the background",
        responses=answers(replies.Response, 404, 503),
    )
    async def retrieve(response_id: ResponseId, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise unsupported("stream", "a kept response cannot be streamed")
        return answer_json((await responses.find(request, response_id)).body)

    @router.delete(
        "/v1/responses/{response_id}",
        summary="Forget a response",
        responses=answers(replies.DeletedResponse, 404, 503),
    )
    async def delete(response_id: ResponseId, request: Request) -> Response:
        responses.check_ended(tenant_of(request), response_id, "response_id")
        await responses.find(request, response_id)
        await responses.kept.delete(tenant_of(request), response_id)
        return answer_json({"id": response_id, "object": "response", "deleted": True})

    @router.post(
        "/v1/responses/{response_id}/cancel",
        summary="Cancel a response that is being made in the background",
        responses=answers(replies.Response, 400, 404, 503),
    )
    async def cancel(response_id: ResponseId, request: Request) -> Response:
        return answer_json(await responses.cancel(request, response_id))

    @router.get(
        "/v1/responses/{response_id}/input_items",
        summary="The items that a response's request had as input",
        responses=answers(replies.ItemList, 400, 404, 503),
        openapi_extra=PAGE,
    )
    async def input_items(response_id: ResponseId, request: Request) -> Response:
        items = (await responses.find(request, response_id)).input
        return answer_json(_listed(items, dict(request.query_params)))


def _listed(items: Sequence[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    """A page of items: `limit` of them behind the id `after`, the newest first unless `order` is asc."""
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MOST_LISTED):
        raise bad_field("limit", f"must be a number from 1 to {MOST_LISTED}")
    if order not in ("asc", "desc"):
        raise bad_field("order", "must be asc or desc")
    ordered = list(items if order == "asc" else reversed(items))
    places = [i for i, one in enumerate(ordered) if one["id"] == after]
    if after is not None and not places:
        raise bad_field("after", "no item of this id is in the list")
    rest = ordered[places[0] + 1 if places else 0 :]
    page = rest[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = len(rest) > len(page)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
