"""The OpenAPI 3.1 document: FastAPI's generator over the routes, plus what is the same for all of them (API keys,
headers, errors).

Routes read and write their bodies without FastAPI, so each declares on its decorator what it answers (`answers`,
`failing`), what body it takes (`takes`) and what query (`asks`). Fields are described by `Field(description=…)` on
their models.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.openapi.constants import REF_PREFIX, REF_TEMPLATE
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from slipstream.server import version
from slipstream.server.describe.shape import Error
from slipstream.server.http.auth import PUBLIC

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

# What a status means and what a client should do; then the `code`s in its body, an `Error`.
STATUSES: Mapping[int, tuple[str, tuple[str, ...]]] = {
    400: (
        "The request cannot be served as sent; `param` names the field. Do not repeat it unchanged.",
        (
            *(
                "invalid_value",
                "missing_field",
                "unknown_field",
                "unsupported_value",
                "context_length_exceeded",
                "invalid_image",
            ),
            *(
                "invalid_json",
                "body_too_complex",
                "malformed_request",
                "invalid_request",
                "slot_file_refused",
            ),
        ),
    ),
    401: ("No valid API key.", ("invalid_api_key",)),
    403: ("A server on loopback answers only to its own host names.", ("host_not_allowed",)),
    404: (
        "No such thing here, or switched off on this server.",
        (
            *("not_found", "model_not_found", "not_supported"),
            *("response_not_found", "previous_response_not_found", "item_not_found"),
        ),
    ),
    405: ("The path does not take this method.", ("method_not_allowed",)),
    408: ("The body did not arrive within `--timeout`.", ("body_timeout",)),
    413: ("The body is larger than `--max-body`.", ("body_too_large",)),
    415: ("The body must be JSON, with the content type that says so.", ("unsupported_media_type",)),
    429: ("The queue is full. Try again after `retry-after` seconds.", ("queue_full",)),
    431: (
        "The request's line and headers are longer than 64 KiB; the connection is closed.",
        ("headers_too_large",),
    ),
    500: (
        "The server failed; its log has the cause under the request's id. Another try will not help.",
        ("internal_error", "slot_not_saved", "replicas_failed"),
    ),
    503: (
        "Loading, stopping, its device or store of responses lost, or (where asked) no idle slot. Try again after"
        " `retry-after` seconds.",
        (
            *("loading", "draining", "server_stopping", "device_failed", "responses_store_failed"),
            "no_idle_slot",
        ),
    ),
    504: ("The request took longer than `--request-timeout`.", ("request_timeout",)),
}
# Statuses of a route that reads a body and asks the engine; and of a route that generates.
WORK = (400, 408, 413, 415, 503)
GENERATE = (*WORK, 429, 504)
HEADERS = {"x-request-id": "the client's, if it is well-formed, else a fresh one", "retry-after": "seconds"}
RETRY_AFTER = ("429", "503")

_referred: dict[str, type[BaseModel]] = {}


def schema_of(*models: type[BaseModel]) -> Schema:
    """A reference to a model, or to any of several. `document` adds the models themselves."""
    _referred.update({one.__name__: one for one in models})
    found = [{"$ref": REF_PREFIX + one.__name__} for one in models]
    return found[0] if len(found) == 1 else {"anyOf": found}


def answers(
    reply: Any,
    *statuses: int,
    event: type[BaseModel] | tuple[type[BaseModel], ...] = (),
    is_named: bool = False,
    has_done: bool = True,
) -> Responses:
    """`responses` of a route's decorator: `reply` as JSON, events of type `event` if it can stream, failures.

    `is_named`: events have names, and the last has a type of its own instead of `[DONE]`; `has_done`: whether those
    without names have that `[DONE]`.
    """
    kinds = event if isinstance(event, tuple) else (event,)
    schema = kinds and (_named_event(kinds) if is_named else _event(kinds, has_done=has_done))
    content = {"content": {"text/event-stream": {"schema": schema}}} if schema else {}
    return {200: {"model": reply, **content}, **failing(*statuses)}


def failing(*statuses: int, model: type[BaseModel] = Error) -> Responses:
    """`responses` of a route's decorator for failures with these statuses; `model` is the body."""
    body = {"application/json": {"schema": schema_of(model)}}
    return {status: {"description": STATUSES[status][0], "content": body} for status in statuses}


def takes(
    *models: type[BaseModel], example: Mapping[str, Any] | Sequence[Any], required: bool = True
) -> Schema:
    """`openapi_extra` of a route's decorator: its body is one of these models."""
    content = {"schema": schema_of(*models), "example": example}
    return {"requestBody": {"required": required, "content": {"application/json": content}}}


def asks(*, required: bool = False, **parameters: tuple[str, Schema]) -> Schema:
    """`openapi_extra` of a route's decorator: the parameters of its query, each with its meaning and its schema."""
    told = {"in": "query", "required": required}
    return {
        "parameters": [
            {"name": name, **told, "description": meaning, "schema": schema}
            for name, (meaning, schema) in parameters.items()
        ]
    }


def _event(models: Sequence[type[BaseModel]], *, has_done: bool) -> Schema:
    """The schema of a server-sent event, in the form OpenAPI 3.2 gives it."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        # A failure after the first byte is an event too: the status has been sent already.
        "contentSchema": schema_of(*models, Error),
    }
    last = " The last is `[DONE]`." if has_done else ""
    end = {"const": "[DONE]"} if has_done else {"type": "null"}
    return {
        "type": "object",
        "description": f"With `stream`: one event.{last} Comment lines keep the connection open.",
        "properties": {"event": {"const": "message"}, "data": {"anyOf": [end, data]}},
        "required": ["data"],
        "additionalProperties": False,
    }


def _named_event(models: Sequence[type[BaseModel]]) -> Schema:
    """The same for events whose name is also the `type` of their data, failures included."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema_of(*models)}
    return {
        "type": "object",
        "description": "With `stream`: one event. Comment lines keep the connection open.",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"type": "null"}, data]}},
        "required": ["event", "data"],
        "additionalProperties": False,
    }


def routes(prefix: str, *, keyed: bool) -> APIRouter:
    """`GET /openapi.json`. `prefix`: `--api-prefix`, before every path; `keyed`: whether the server has API keys."""
    router = APIRouter()

    @router.get("/openapi.json", summary="This document")
    def openapi(request: Request) -> Response:
        app = request.app
        if app.openapi_schema is None:
            app.openapi_schema = document(app.routes, prefix=prefix, keyed=keyed)
        return Response(orjson.dumps(app.openapi_schema), media_type="application/json")

    return router


def document(routes: Sequence[BaseRoute], *, prefix: str = "", keyed: bool = False) -> Schema:
    """The whole document of an application's routes, as JSON values."""
    with warnings.catch_warnings():
        # GET and HEAD of a path are a single route with a single id; `_complete` gives each an id of its own.
        warnings.filterwarnings("ignore", "Duplicate Operation ID")
        made = get_openapi(
            title="Slipstream",
            version=version(),
            description="An OpenAI-compatible server with lossless speculative decoding.",
            license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
            servers=[{"url": prefix or "/"}],
            routes=routes,
            separate_input_output_schemas=False,
        )
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            _complete(path, method, operation)
    # `_referred` is complete by now: routes add to it when they are made.
    _, referred = models_json_schema(
        [(one, "validation") for one in _referred.values()], ref_template=REF_TEMPLATE
    )
    schemas = made["components"]["schemas"] | referred["$defs"]
    made["components"] = {
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        },
        "headers": {
            name: {"description": meaning, "schema": {"type": "string"}} for name, meaning in HEADERS.items()
        },
        # FastAPI adds its own models of validation errors, but none of these routes validates by FastAPI.
        "schemas": {name: one for name, one in schemas.items() if "ValidationError" not in name},
    }
    # A key in either header; the empty entry, no key at all, is for a server without keys.
    made["security"] = [{"bearer": []}, {"header": []}, *([] if keyed else [{}])]
    return made


def _complete(path: str, method: str, operation: Schema) -> None:
    """Adds to an operation what every operation has: an id, headers, and errors that come before its route."""
    words = "".join(char if char.isalnum() else " " for char in path).split() or ["page"]
    operation["operationId"] = "_".join([method, *words])
    always = failing(403, 500) if path in PUBLIC else failing(401, 403, 500)
    found = {str(status): one for status, one in always.items()} | operation["responses"]
    found.pop("422", None)  # FastAPI's validation error, which no route here answers
    operation["responses"] = dict(sorted(found.items()))
    if path in PUBLIC:
        operation["security"] = []
    for status, response in found.items():
        names = HEADERS if status in RETRY_AFTER else ("x-request-id",)
        response["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
        if method == "head":
            del response["content"]
