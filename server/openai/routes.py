"""Routes of OpenAI's API: chat and plain completions, the token counts of their prompts, the model; and llama-server's
`/apply-template`, which takes a chat body.

A path also works without `/v1` if llama-server has it there with the same meaning: so not `/completions`.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.describe.openapi import GENERATE, WORK, answers, takes
from slipstream.server.http.body import answer_json
from slipstream.server.http.error_table import not_found
from slipstream.server.openai import replies
from slipstream.server.openai.convert import asked_tools, chat_job, completion_job, read_chat
from slipstream.server.openai.model_card import card, model_list, names
from slipstream.server.openai.serving import Serving
from slipstream.server.openai.wire import ChatRequest, CompletionRequest

_CONVERSATION = [{"role": "user", "content": "Write the docstring:\n\ndef f(x): ..."}]
_CHAT = takes(ChatRequest, example={"messages": _CONVERSATION, "max_tokens": 16})
# Arguments of the decorators of routes with two paths.
CHAT: Any = {
    "summary": "Continue a conversation",
    "responses": answers(replies.ChatCompletion, *GENERATE, event=replies.ChatCompletionChunk),
    "openapi_extra": _CHAT,
}
CHAT_TOKENS: Any = {
    "summary": "The tokens a conversation would be",
    "responses": answers(replies.InputTokens, *WORK, 429),
    "openapi_extra": _CHAT,
}
MODELS: Any = {"summary": "The model served", "responses": answers(replies.ModelList, 503)}


def routes(serving: Serving) -> APIRouter:
    router = APIRouter()
    _add_chat(router, serving)
    _add_completions(router, serving)
    _add_models(router, serving)
    return router


def _add_chat(router: APIRouter, serving: Serving) -> None:
    @router.post("/chat/completions", **CHAT)
    @router.post("/v1/chat/completions", **CHAT)
    async def chat_completions(request: Request) -> Response:
        return await serving.reply(request, ChatRequest, chat_job)

    @router.post("/chat/completions/input_tokens", **CHAT_TOKENS)
    @router.post("/v1/chat/completions/input_tokens", **CHAT_TOKENS)
    async def chat_tokens(request: Request) -> Response:
        return await serving.count(request, ChatRequest, chat_job)

    @router.post(
        "/apply-template",
        summary="A conversation as the model's template writes it",
        responses=answers(replies.RenderedPrompt, *WORK, 429),
        openapi_extra=_CHAT,
    )
    async def apply_template(request: Request) -> Response:
        engine = serving.gate.for_work()
        wire = await serving.read(request, ChatRequest)
        caller = await serving.caller(engine, request, tuple(wire.images()))
        prompt = await engine.render(read_chat(wire, asked_tools(wire, caller.known), caller))
        return answer_json({"prompt": prompt})


def _add_completions(router: APIRouter, serving: Serving) -> None:
    @router.post(
        "/v1/completions",
        summary="Continue a text",
        responses=answers(replies.TextCompletion, *GENERATE, event=replies.TextCompletionChunk),
        openapi_extra=takes(CompletionRequest, example={"prompt": "def add(a, b):\n", "max_tokens": 16}),
    )
    async def completions(request: Request) -> Response:
        return await serving.reply(request, CompletionRequest, completion_job)

    @router.post(
        "/v1/completions/input_tokens",
        summary="The tokens a text is",
        responses=answers(replies.InputTokens, *WORK),
        openapi_extra=takes(CompletionRequest, example={"prompt": "def add(a, b):\n"}),
    )
    async def completion_tokens(request: Request) -> Response:
        return await serving.count(request, CompletionRequest, completion_job)


def _add_models(router: APIRouter, serving: Serving) -> None:
    gate, settings = serving.gate, serving.settings

    @router.get("/models", **MODELS)
    @router.get("/v1/models", **MODELS)
    async def models() -> Response:
        engine = gate.for_looking()
        return answer_json(model_list(engine.info, settings, await serving.knowing.of(engine)))

    @router.get(
        "/v1/models/{name:path}",
        summary="The model of that name",
        responses=answers(replies.ModelCard, 404, 503),
    )
    async def model(name: Annotated[str, Path(description="as in `/v1/models`")]) -> Response:
        info = gate.for_looking().info
        if name not in names(info, settings):
            message = "no such model; /v1/models lists what is served"
            raise not_found(message, code="model_not_found", param="model")
        return answer_json(card(info, settings))
