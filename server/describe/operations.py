"""Every endpoint as the OpenAPI document tells it: what it takes, what it answers, with which statuses.

The routes themselves read and answer by their own code; tests hold both sides against this page, and a route
that is missing here turns one red. What bodies and replies look like follows from the models named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from slipstream.server.describe.server_replies import Error, Health, HealthProblem, Life, Props, Slot
from slipstream.server.http import web_page as pages
from slipstream.server.http.auth import PUBLIC
from slipstream.server.native import replies as native
from slipstream.server.native.wire import Detokenize, EraseSlot, SlotFile, Tokenize
from slipstream.server.openai import replies as openai
from slipstream.server.openai.wire import ChatRequest, CompletionRequest

# What a status means, and what a client should do. Every one comes with the body `Error`.
STATUSES: Mapping[int, str] = {
    400: "The request cannot be served as sent; `param` names the field. Do not repeat it unchanged.",
    401: "No valid API key.",
    403: "A server on loopback answers only to its own host names.",
    404: "No such thing here.",
    405: "The path does not take this method.",
    408: "The body did not arrive within `--timeout`.",
    413: "The body is larger than `--max-body`.",
    415: "The body must be JSON, with the content type that says so.",
    429: "The queue is full. Try again after `retry-after` seconds.",
    500: "The server failed; its log has the cause under the request's id. Another try will not help.",
    501: "Switched off on this server. Another try will not help.",
    503: "Loading, stopping, or (where asked) without an idle slot. Try again after `retry-after` seconds.",
    504: "The request took longer than `--request-timeout`.",
}
# The `code` in its body, by status; the message says the rest.
CODES: Mapping[int, tuple[str, ...]] = {
    400: (
        *("invalid_value", "missing_field", "unknown_field", "unsupported_value", "context_length_exceeded"),
        *("invalid_json", "malformed_request", "invalid_request", "slot_file_refused"),
    ),
    401: ("invalid_api_key",),
    403: ("host_not_allowed",),
    404: ("not_found", "model_not_found", "not_supported"),
    405: ("method_not_allowed",),
    408: ("body_timeout",),
    413: ("body_too_large",),
    415: ("unsupported_media_type",),
    429: ("queue_full",),
    500: ("internal_error",),
    501: ("not_supported",),
    503: ("loading", "draining", "server_stopping", "no_idle_slot"),
    504: ("request_timeout",),
}
ALWAYS = (401, 403, 500)
BODY = (400, 408, 413, 415)
WORK = (*BODY, 503)
GENERATE = (*WORK, 429, 504)

Models = tuple[type[BaseModel], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. Of several models each is a form the body may have."""

    summary: str
    body: Models = ()
    body_required: bool = True
    reply: Models = ()  # with status 200, as JSON
    many: bool = False  # … a list of them
    event: type[BaseModel] | None = None  # the data of one server-sent event, where `stream` asks for them
    media: str | None = None  # of a reply that is not JSON
    statuses: tuple[int, ...] = ()
    errors: Mapping[int, type[BaseModel]] = field(default_factory=dict)  # where a failure says more
    parameters: tuple[Mapping[str, Any], ...] = ()
    example: Mapping[str, Any] | None = None
    public: bool = False
    methods: tuple[str, ...] = ("get",)


def _parameter(name: str, place: str, meaning: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    required = place == "path" or "enum" in schema
    return {"name": name, "in": place, "required": required, "description": meaning, "schema": schema}


_CHAT = {"messages": [{"role": "user", "content": "Write the docstring:\n\ndef f(x): ..."}], "max_tokens": 16}
_NO_SLOT = _parameter("fail_on_no_slot", "query", "1: 503 while every slot is busy", {"type": "string"})
_HEALTH = Operation(
    summary="Ready for requests?",
    reply=(Health,),
    statuses=(503,),
    errors={500: HealthProblem, 503: HealthProblem},
    public=True,
    parameters=(_NO_SLOT,),
    methods=("get", "head"),
)

_OPENAI = {
    "/v1/chat/completions": Operation(
        summary="Continue a conversation",
        body=(ChatRequest,),
        reply=(openai.ChatCompletion,),
        event=openai.ChatCompletionChunk,
        statuses=GENERATE,
        example=_CHAT,
        methods=("post",),
    ),
    "/v1/completions": Operation(
        summary="Continue a text",
        body=(CompletionRequest,),
        reply=(openai.TextCompletion,),
        event=openai.TextCompletionChunk,
        statuses=GENERATE,
        example={"prompt": "def add(a, b):\n", "max_tokens": 16},
        methods=("post",),
    ),
    "/v1/chat/completions/input_tokens": Operation(
        summary="The tokens a conversation would be",
        body=(ChatRequest,),
        reply=(openai.InputTokens,),
        statuses=WORK,
        example=_CHAT,
        methods=("post",),
    ),
    "/v1/completions/input_tokens": Operation(
        summary="The tokens a text is",
        body=(CompletionRequest,),
        reply=(openai.InputTokens,),
        statuses=WORK,
        example={"prompt": "def add(a, b):\n"},
        methods=("post",),
    ),
    "/v1/models": Operation(summary="The model served", reply=(openai.ModelList,), statuses=(503,)),
    "/v1/models/{name}": Operation(
        summary="The model of that name",
        reply=(openai.ModelCard,),
        statuses=(404, 503),
        parameters=(_parameter("name", "path", "as `/v1/models` tells it", {"type": "string"}),),
    ),
    "/apply-template": Operation(
        summary="A conversation as the model's template writes it",
        body=(ChatRequest,),
        reply=(openai.RenderedPrompt,),
        statuses=WORK,
        example=_CHAT,
        methods=("post",),
    ),
}

_NATIVE = {
    "/tokenize": Operation(
        summary="Text to token ids",
        body=(Tokenize,),
        reply=(native.Tokens,),
        statuses=WORK,
        example={"content": "def add(a, b):"},
        methods=("post",),
    ),
    "/detokenize": Operation(
        summary="Token ids to text",
        body=(Detokenize,),
        reply=(native.Content,),
        statuses=WORK,
        example={"tokens": [5, 6, 7]},
        methods=("post",),
    ),
    "/slots/{slot}": Operation(
        summary="What a slot has computed, to and from a file under `--slot-save-path`",
        body=(SlotFile, EraseSlot),
        body_required=False,
        reply=(native.SlotSaved, native.SlotRestored, native.SlotErased),
        statuses=(*WORK, 501),
        parameters=(
            _parameter("slot", "path", "number of the slot", {"type": "string", "pattern": "^[0-9]{1,9}$"}),
            _parameter(
                "action", "query", "what to do", {"type": "string", "enum": ["save", "restore", "erase"]}
            ),
        ),
        example={"filename": "talk"},
        methods=("post",),
    ),
}

_STATUS = {
    "/health": _HEALTH,
    "/v1/health": _HEALTH,
    "/ready": _HEALTH,
    "/live": Operation(
        summary="Worth keeping alive? Only a failed engine is not",
        reply=(Life,),
        statuses=(503,),
        errors={503: Life},
        public=True,
        methods=("get", "head"),
    ),
    "/slots": Operation(
        summary="What each slot is doing",
        reply=(Slot,),
        many=True,
        statuses=(503,),
        parameters=(_NO_SLOT,),
    ),
    "/props": Operation(summary="Settings, model and engine", reply=(Props,), statuses=(503,)),
    "/metrics": Operation(summary="Figures for Prometheus", media="text/plain", statuses=(503,)),
    "/openapi.json": Operation(summary="This document", media="application/json"),
}

_PAGES = {
    path: Operation(summary=f"The chat page: {name}", media=kind, public=True, methods=("get", "head"))
    for path, (name, kind) in pages.FILES.items()
}

# llama-server has these without `/v1` as well.
_ALIASES = {
    path: _OPENAI["/v1" + path] for path in ("/chat/completions", "/chat/completions/input_tokens", "/models")
}

OPERATIONS: Mapping[str, Operation] = {**_OPENAI, **_ALIASES, **_NATIVE, **_STATUS, **_PAGES}

assert all(one.public == (path in PUBLIC | pages.FILES.keys()) for path, one in OPERATIONS.items())


def statuses_of(operation: Operation) -> dict[int, type[BaseModel]]:
    """Statuses beside 200 with the model of their body."""
    found = sorted({*ALWAYS, *operation.statuses} - ({401} if operation.public else set()))
    return {status: operation.errors.get(status, Error) for status in found}
