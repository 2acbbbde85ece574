"""Request bodies: JSON to a validated wire model, or a 400 that names the field but never repeats the input.

orjson refuses what Python's parser accepts: NaN, infinities, lone surrogates, endless nesting. Of a key given twice in
one object it keeps the last value, while a proxy in front may have checked the first; such bodies are refused here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.http.error_table import bad_field, bad_request, compressed, not_json
from slipstream.server.report.logs import logger

log = logger(__name__)
Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")
Json = TypeVar("Json", dict[str, Any], list[Any])
OWN_CODES = frozenset({"unsupported_value"})
# Longer bodies (bytes) are read in a thread, as that takes up to 0.1 s; one after the other, so that memory and the
# interpreter are left to others.
LONG_BODY = 1 << 15
GZIP = b"\x1f\x8b"  # what a compressed body begins with, and no JSON
LONG_BODIES = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-bodies")
# What a body may have of these characters, in texts or not: the parser holds the interpreter for some 0.15 µs for each
# list, object and key, and 0.03 µs for other values. A million token ids, or a text of a million tokens, stay below.
MOST = (("brackets", b"[{", 1 << 18), ("colons", b":", 1 << 18), ("commas", b",", 1 << 20))


def wrong(message: str, *, code: str = "invalid_value") -> PydanticCustomError:
    """An error for a field validator to raise."""
    return PydanticCustomError(code, "{reason}", {"reason": message})


def type_of(value: Any) -> Any:
    """The `type` of an object, which may be of any kind; None for what is no object."""
    return value.get("type") if isinstance(value, dict) else None


async def read_json(request: Request, reading: Callable[[dict[str, Any]], T]) -> T:
    """What `reading` makes of the body, an object. Raises `Refused`, and what `reading` raises.

    The content type must be JSON's: HTML forms of other web sites cannot send that without a CORS preflight.
    """
    return await _read(request, lambda body: reading(parse(body)))


async def read_array(request: Request) -> list[Any]:
    """The body, an array. Raises `Refused`."""
    return await _read(request, lambda body: parse(body, list))


async def _read(request: Request, reading: Callable[[bytes], T]) -> T:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise not_json()
    body = await request.body()
    if body.startswith(GZIP):
        raise compressed()
    if len(body) > LONG_BODY:
        work = partial(copy_context().run, lambda: reading(body))
        return await asyncio.get_running_loop().run_in_executor(LONG_BODIES, work)
    return reading(body)


def parse(body: bytes, kind: type[Json] = dict) -> Json:  # type: ignore[assignment]
    """A JSON object, or a value of another kind. Raises `Refused`."""
    for name, marks, most in MOST:
        if (n := sum(body.count(mark) for mark in marks)) > most:
            reason = f"the body has {n} {name}, also inside texts; at most {most} are read"
            raise bad_request(reason, code="body_too_complex")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, kind):
        name = "array" if kind is list else "object"
        raise bad_request(f"the body must be a JSON {name}", code="invalid_json")
    if _has_a_key_twice(body, data):
        reason = "the body is not valid JSON: a key is given twice in one object"
        raise bad_request(reason, code="invalid_json")
    return data


def answer_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def _has_a_key_twice(body: bytes, data: dict[str, Any] | list[Any]) -> bool:
    """Whether `body`, valid JSON, has more keys than `data`, which was parsed from it.

    Keys are counted by the colons outside strings: without escaped characters, every other quote begins one.
    """
    n_keys = 0
    waiting: list[Any] = [data]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            n_keys += len(one)
            one = one.values()
        waiting += [inner for inner in one if isinstance(inner, dict | list)]
    if body.count(b":") == n_keys:
        return False
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    return sum(part.count(b":") for part in outside) != n_keys


def checked(model: type[Model], data: dict[str, Any], *, strict: bool) -> Model:
    """`data` as `model`. Unknown fields are ignored and logged, or refused when `strict`. Raises `Refused`."""
    try:
        made = model.model_validate(data)
    except ValidationError as error:
        raise _first(error) from None
    unknown = sorted(made.model_extra or ())
    if unknown and strict:
        raise bad_request(
            f"unknown field: {shown(unknown[0])}", param=shown(unknown[0]), code="unknown_field"
        )
    if unknown:
        log.debug("unknown_fields", names=",".join(shown(name) for name in unknown[:32]))
    return made


def shown(name: str) -> str:
    """A field name sent by a client, made short and printable for an error message or a log line."""
    return "".join(char for char in name[:64] if char.isprintable()) or "?"


def _first(error: ValidationError) -> Exception:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    code = first["type"] if first["type"] in OWN_CODES else "invalid_value"
    if first["type"] == "missing":
        return bad_field(param, "this field is required", code="missing_field")
    return bad_field(param, first["msg"], code=code)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`; names of types, which begin with a colon, are left out."""
    path = ""
    for step in location:
        if isinstance(step, str) and step.startswith(":"):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{shown(step)}" if path else shown(step)
    return path or "body"
