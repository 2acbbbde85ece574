"""Of which JSON types the values of a parameter are, by its schema.

References are followed within the tool's parameters, each at most once, so that circles end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.server.openai.formats.schemas import choices_of, referred

Schema = Mapping[str, Any]

KINDS: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
    "integer": int,
    "number": (int, float),
}
MOST_DEPTH = 32  # of choices within choices; what lies deeper is not looked at


def types_of(schema: Schema, root: Schema) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not say. `root`: that of its references."""
    return _types(schema, root, set(), MOST_DEPTH)


def is_of(value: Any, kind: str) -> bool:
    """Whether a value is of a JSON type other than a string."""
    if kind in ("integer", "number") and isinstance(value, bool):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return kind in KINDS and isinstance(value, KINDS[kind])


def _types(schema: Schema, root: Schema, seen: set[str], depth: int) -> frozenset[str]:
    """As `types_of`. `seen`: the references followed so far."""
    if depth == 0:
        return frozenset()
    said = []
    for part in _parts(schema, root, seen):
        found = _declared(part)
        for union in ("anyOf", "oneOf"):
            for choice in _schemas(part.get(union)):
                found |= _types(choice, root, seen, depth - 1)
        found = found or {_type_of(one) for one in choices_of(part) or ()}
        if found:
            said.append(frozenset(found))
    # Every part has to hold. None holds for two that contradict, or that say "number" and "integer".
    return frozenset.intersection(*said) or frozenset().union(*said) if said else frozenset()


def _parts(schema: Schema, root: Schema, seen: set[str]) -> Iterator[Schema]:
    """The schemas that have to hold together: this one, what it refers to, and those of its `allOf`."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += _schemas(part.get("allOf"))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting += _schemas([referred(reference, root)])


def _schemas(found: Any) -> list[Schema]:
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _declared(schema: Schema) -> set[str]:
    """The types that a schema names."""
    declared = schema.get("type")
    named = declared if isinstance(declared, list) else [declared]
    return {one for one in named if isinstance(one, str)}


def _type_of(value: Any) -> str:
    return next((one for one in KINDS if is_of(value, one)), "string")
