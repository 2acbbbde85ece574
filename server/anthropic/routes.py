"""Routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.anthropic import replies
from slipstream.server.anthropic.conversion import messages_job
from slipstream.server.anthropic.error_shape import PATH
from slipstream.server.anthropic.wire import CountRequest, MessagesRequest
from slipstream.server.describe.openapi import GENERATE, WORK, answers, failing, takes
from slipstream.server.http.body import answer_json
from slipstream.server.openai.serving import Serving, in_names, n_prompt

# Fields of a chat that have another name here.
NAMES = {"response_format": "output_config.format", "reasoning_effort": "output_config.effort"}
_CONVERSATION = [{"role": "user", "content": "Write the docstring:\n\ndef f(x): ..."}]
# Errors have a shape of their own here, also those that come before a route.
_ALWAYS = (401, 403, 500)
CREATE: Any = {
    "summary": "Continue a conversation, in Anthropic's form",
    "responses": answers(replies.MessageBody, event=replies.EVENTS, is_named=True)
    | failing(*GENERATE, *_ALWAYS, model=replies.MessagesError),
    "openapi_extra": takes(MessagesRequest, example={"messages": _CONVERSATION, "max_tokens": 16}),
}
COUNT: Any = {
    "summary": "The tokens such a conversation would be",
    "responses": answers(replies.TokenCount) | failing(*WORK, 429, *_ALWAYS, model=replies.MessagesError),
    "openapi_extra": takes(CountRequest, example={"messages": _CONVERSATION}),
}


def routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    async def counted(request: Request) -> Response:
        engine = serving.gate.for_work()
        job = await serving.job(engine, request, CountRequest, messages_job)
        return answer_json({"input_tokens": await n_prompt(engine, job)})

    @router.post(PATH, **CREATE)
    async def create(request: Request) -> Response:
        return await in_names(NAMES, serving.reply(request, MessagesRequest, messages_job))

    @router.post(f"{PATH}/count_tokens", **COUNT)
    async def count(request: Request) -> Response:
        return await in_names(NAMES, counted(request))

    return router
