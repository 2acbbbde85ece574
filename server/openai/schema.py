"""Limits on the JSON schemas that a request may have: size and depth. Whether a schema is valid is found out by the
engine, which compiles it.
"""

from __future__ import annotations

from typing import Any

import orjson

from slipstream.server.http.body import wrong

MAX_SCHEMA_BYTES = 64 << 10
MAX_DEPTH = 64


def read_schema(value: Any) -> Any:
    """A schema: an object within the limits; null stays null. Raises an error for pydantic."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("Input should be a JSON schema, an object")
    check_size(value)
    return value


def check_size(value: Any) -> None:
    """Raises for a value that is nested too deeply or too long, before any code walks it by recursion."""
    check_depth(value)
    if len(orjson.dumps(value)) > MAX_SCHEMA_BYTES:
        raise wrong(f"Input should have at most {MAX_SCHEMA_BYTES >> 10} KiB")


def check_depth(value: Any) -> None:
    """Raises for a value that is nested too deeply."""
    if depth_of(value) > MAX_DEPTH:
        raise wrong(f"Input should be nested at most {MAX_DEPTH} deep")


def depth_of(value: Any) -> int:
    """How deep objects and lists are nested; a plain value has depth 0."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth
