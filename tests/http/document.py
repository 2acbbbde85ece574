"""Holds what the server answers against the OpenAPI document: every reply of every HTTP test goes through here."""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

import httpx
from pydantic import TypeAdapter

from slipstream.engine.settings import Settings
from slipstream.server.describe.openapi import document
from slipstream.server.describe.shape import Error, Shape
from slipstream.server.http.app import create_app
from slipstream.server.http.gate import Gate

DOCUMENT = document(create_app(Gate(), Settings(model="fake")).routes)
# The router answers these for any path, so no operation lists them.
NOWHERE = (404, 405)


def subclasses(kind: type) -> dict[str, type]:
    """All subclasses by name."""
    found = {one.__name__: one for one in kind.__subclasses__()}
    return found | {name: inner for one in found.values() for name, inner in subclasses(one).items()}


MODELS = subclasses(Shape)


def type_of(schema: dict[str, Any]) -> Any:
    """The type of a reply's schema: a model, one of several, or a list."""
    if "anyOf" in schema:
        return functools.reduce(operator.or_, map(type_of, schema["anyOf"]))
    if schema.get("type") == "array":
        return list[type_of(schema["items"])]
    if schema.get("type") == "object":
        return dict[str, Any]
    return MODELS[schema["$ref"].rpartition("/")[2]]


def operation(path: str, method: str = "") -> dict[str, Any]:
    """The operation of a path; without a method, that of GET or else POST."""
    methods = DOCUMENT["paths"][path]
    return methods[method] if method else methods.get("get") or methods["post"]


def reply_schema(path: str, method: str = "") -> dict[str, Any] | None:
    """The schema of a reply as JSON; None for other media and for a reply without a model."""
    content = operation(path, method)["responses"]["200"]["content"]
    return content.get("application/json", {}).get("schema") or None


def event_schema(path: str, method: str = "") -> dict[str, Any] | None:
    """The schema of what an event of a stream holds; None where there is no stream."""
    content = operation(path, method)["responses"]["200"]["content"]
    if "text/event-stream" not in content:
        return None
    _, data = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    return data["contentSchema"]


def hold(path: str, status: int, body: str | bytes, method: str = "") -> None:
    """Raises ValidationError unless the body is what the operation of that path says, and nothing more."""
    found = operation(path, method)["responses"]
    assert str(status) in found or status in NOWHERE, f"{path} may not answer {status}"
    one = found.get(str(status))
    kind = type_of(one["content"]["application/json"]["schema"]) if one else Error
    TypeAdapter(kind).validate_json(body, extra="forbid")


def hold_events(path: str, text: str, method: str = "") -> None:
    """The same for the events of a stream: chunks, or a failure after the first byte."""
    kind = TypeAdapter(type_of(event_schema(path, method)))
    for line in text.split("\n"):
        data = line.removeprefix("data: ")
        if line.startswith("data: ") and data != "[DONE]":
            kind.validate_json(data, extra="forbid")


def held(answer: httpx.Response) -> httpx.Response:
    """The answer itself, after a look at it. Paths that are not ours, and pages, are let through."""
    asked = answer.request
    paths, method = DOCUMENT["paths"], asked.method.lower()
    path = next(
        (one for one in paths if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", one), asked.url.path)), None
    )
    if path is None or method not in paths[path]:
        return answer
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        hold_events(path, answer.text, method)
    elif kind == "application/json" and reply_schema(path, method):
        hold(path, answer.status_code, answer.content, method)
    return answer
