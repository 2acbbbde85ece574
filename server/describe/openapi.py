"""The OpenAPI 3.1 document, made from the models that read requests and from those of the replies.

Public: `document()` as data, `routes()` for `/openapi.json`, `schemas_of()` for the generated page in docs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from slipstream.server import version
from slipstream.server.describe.meanings import meaning
from slipstream.server.describe.operations import OPERATIONS, STATUSES, Operation, statuses_of
from slipstream.server.describe.server_replies import Error, Shape
from slipstream.server.openai.refuse import IGNORED, REFUSED
from slipstream.server.openai.wire import Generate, Speculative

Schema = dict[str, Any]
REFERENCE = "#/components/schemas/"
HEADERS = {"x-request-id": "the client's, if it is well-formed, else a fresh one", "retry-after": "seconds"}
RETRY_AFTER = (429, 503)


def routes(prefix: str, *, keyed: bool) -> APIRouter:
    """`GET /openapi.json`; `prefix` is what stands before every path here, `keyed` whether there are API keys."""
    router = APIRouter()

    @router.get("/openapi.json")
    def openapi() -> Response:
        body = orjson.dumps(
            {**document(), "servers": [{"url": prefix or "/"}], "security": _security(keyed=keyed)}
        )
        return Response(body, media_type="application/json")

    return router


@functools.cache
def document() -> Mapping[str, Any]:
    """The whole document; not to be changed by the caller."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Slipstream",
            "version": version(),
            "description": "An OpenAI-compatible server with lossless speculative decoding.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": _security(keyed=False),
        "paths": {
            path: {method: _operation(path, method, one) for method in one.methods}
            for path, one in OPERATIONS.items()
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
            "headers": {
                name: {"description": told, "schema": {"type": "string"}} for name, told in HEADERS.items()
            },
            "schemas": schemas_of(_models()),
        },
    }


def _security(*, keyed: bool) -> list[Schema]:
    """A key either way; the empty entry is for a server that has none."""
    return [{"bearer": []}, {"header": []}, *([] if keyed else [{}])]


def _models() -> Iterator[type[BaseModel]]:
    for one in OPERATIONS.values():
        yield from (*one.body, *one.reply, *statuses_of(one).values())
        if one.event:
            yield one.event


def _operation(path: str, method: str, one: Operation) -> Schema:
    words = "".join(char if char.isalnum() else " " for char in path).split() or ["page"]
    told: Schema = {"summary": one.summary, "operationId": "_".join([method, *words])}
    if one.public:
        told["security"] = []
    if one.parameters:
        told["parameters"] = list(one.parameters)
    if one.body:
        content: Schema = {"schema": _any(one.body)}
        if one.example:
            content["example"] = one.example
        told["requestBody"] = {"required": one.body_required, "content": {"application/json": content}}
    told["responses"] = {"200": {"description": "Done", **_headers(200), "content": _success(one)}} | {
        str(status): {
            "description": STATUSES[status],
            **_headers(status),
            "content": {"application/json": {"schema": _any((model,))}},
        }
        for status, model in statuses_of(one).items()
    }
    if method == "head":
        for response in told["responses"].values():
            del response["content"]
    return told


def _success(one: Operation) -> Schema:
    if one.media:
        return {one.media: {}}
    whole = _any(one.reply)
    content = {"application/json": {"schema": {"type": "array", "items": whole} if one.many else whole}}
    if one.event:
        content["text/event-stream"] = {"schema": _event(one.event)}
    return content


def _event(model: type[BaseModel]) -> Schema:
    """One server-sent event, in the form OpenAPI 3.2 gives it."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        # A failure after the first byte is an event too: the status has long been sent.
        "contentSchema": {"anyOf": [_any((model,)), _any((Error,))]},
    }
    return {
        "type": "object",
        "description": "With `stream`: one event. The last is `[DONE]`; comment lines keep the connection open.",
        "properties": {"event": {"const": "message"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
        "additionalProperties": False,
    }


def _headers(status: int) -> Schema:
    names = ("x-request-id", "retry-after") if status in RETRY_AFTER else ("x-request-id",)
    return {"headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names}}


def _any(models: Sequence[type[BaseModel]]) -> Schema:
    found = [{"$ref": REFERENCE + one.__name__} for one in models]
    return found[0] if len(found) == 1 else {"anyOf": found}


def schemas_of(models: Iterator[type[BaseModel]]) -> dict[str, Schema]:
    """The schemas of these models and of all they are made of, by name, with the meaning of each field."""
    unique = list(dict.fromkeys(models))
    _, found = models_json_schema([(one, "validation") for one in unique], ref_template=REFERENCE + "{model}")
    schemas: dict[str, Schema] = {name: _plain(one) for name, one in found["$defs"].items()}
    kinds = {one.__name__: one for one in unique}
    for name, schema in schemas.items():
        kind = kinds.get(name)
        if kind is not None and issubclass(kind, Generate):
            schema["properties"] |= _refused() | _dotted(schemas[Speculative.__name__])
        # What a later version adds to a reply must not break a client generated from this document.
        if _is_reply(name):
            schema.pop("additionalProperties", None)
        else:
            _explain(name, schema)
    return schemas


@functools.cache
def _reply_names() -> frozenset[str]:
    waiting: list[type] = [Shape]
    names = set()
    while waiting:
        one = waiting.pop()
        names.add(one.__name__)
        waiting += one.__subclasses__()
    return frozenset(names)


def _is_reply(name: str) -> bool:
    return name in _reply_names()


def _explain(model: str, schema: Schema) -> None:
    for name, one in schema.get("properties", {}).items():
        if "description" not in one and (told := meaning(model, name.removeprefix("speculative."))):
            one["description"] = told


def _refused() -> dict[str, Schema]:
    """Fields that are refused unless they hold a value that asks for nothing, and those that are ignored."""
    ignored = {name: {"description": "Accepted, without influence."} for name in sorted(IGNORED)}
    return ignored | {
        name: {"enum": [*off, None], "description": f"Otherwise refused: {reason}."}
        for name, (reason, off) in REFUSED.items()
    }


def _dotted(speculative: Schema) -> dict[str, Schema]:
    return {f"speculative.{name}": dict(one) for name, one in speculative["properties"].items()}


def _plain(schema: Any) -> Any:
    """Without titles that only repeat a field's name, and without defaults that say "absent"."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = {"title"} | ({"default"} if schema.get("default", ...) is None else set())
    return {
        # A field may itself be called `title` or `default`: names of fields are kept as they are.
        key: {name: _plain(one) for name, one in value.items()}
        if key in ("properties", "$defs")
        else _plain(value)
        for key, value in schema.items()
        if key not in dropped or not isinstance(value, str | None)
    }
