"""Holds what the server answers against the OpenAPI document: every reply of every HTTP test goes through here."""

from __future__ import annotations

import re
from typing import Any

import httpx
from pydantic import TypeAdapter

from slipstream.server.describe.operations import OPERATIONS, statuses_of
from slipstream.server.describe.server_replies import Error

# Told by the router about any path, so no operation lists them.
NOWHERE = (404, 405)


def hold(path: str, status: int, body: str | bytes) -> None:
    """Raises ValidationError unless the body is what the operation of that path says, and nothing more."""
    one = OPERATIONS[path]
    if status != 200:
        found = statuses_of(one)
        assert status in (*found, *NOWHERE), f"{path} may not answer {status}"
        TypeAdapter(found.get(status, Error)).validate_json(body)
        return
    kinds: Any = one.reply[0]
    for more in one.reply[1:]:
        kinds |= more
    TypeAdapter(list[kinds] if one.many else kinds).validate_json(body)


def hold_events(path: str, text: str) -> None:
    """The same for the events of a stream: chunks, or a failure after the first byte."""
    kind: Any = OPERATIONS[path].event
    for one in text.split("\n\n"):
        data = one.removeprefix("data: ")
        if one.startswith("data: ") and data != "[DONE]":
            TypeAdapter(kind | Error).validate_json(data)


def held(answer: httpx.Response) -> httpx.Response:
    """The answer itself, after a look at it. Paths that are not ours, and pages, are let through."""
    asked = answer.request
    path = next(
        (one for one in OPERATIONS if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", one), asked.url.path)), None
    )
    if path is None or asked.method.lower() not in OPERATIONS[path].methods:
        return answer
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        hold_events(path, answer.text)
    elif kind == "application/json" and OPERATIONS[path].reply:
        hold(path, answer.status_code, answer.content)
    return answer
