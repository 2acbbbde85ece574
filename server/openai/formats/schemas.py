"""JSON schemas of arguments, for grammars that spell values in another way than JSON.

JSON itself is left to llguidance, which enforces a schema or refuses it. What a grammar here cannot enforce is refused
by the keyword's name, so that no part of a schema is accepted and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from slipstream.server.http.error_table import unsupported
from slipstream.server.openai.formats.format import Tool

# Keywords that narrow what is valid: of any value, and of values of one type.
ANY_TYPE = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "type"})
OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"pattern", "minLength", "maxLength", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset(
        {"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains"}
        | {"maxContains", "minItems", "maxItems", "uniqueItems"}
    ),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"}
        | {"propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"}
        | {"dependencies"}
    ),
}
MEMBERS = frozenset({"properties", "required", "additionalProperties"})
MOST_STEPS = 8  # from a schema to the one that it refers to
ANY_TEXT = r"/(.|\n)*/"  # as Lark
DATE, TIME = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
ZONE = r"(\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": DATE,
    "time": TIME + ZONE,
    "date-time": f"{DATE}T{TIME}{ZONE}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{BYTE}(\.{BYTE}){{3}}",
    "email": r"[A-Za-z0-9_%+-]+(\.[A-Za-z0-9_%+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
}
# Classes of ECMAScript, whose patterns JSON Schema has, in ASCII.
CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[A-Za-z0-9_]", r"\W": "[^A-Za-z0-9_]", "/": r"\/"}


def refuse_others(schema: Mapping[str, Any], handled: Collection[str], *kinds: str) -> None:
    """Raises `Refused` for a keyword that narrows values of any type, or of these types, and is not `handled`."""
    narrowing = ANY_TYPE.union(*(OF_TYPE.get(one, frozenset()) for one in kinds))
    found = next((one for one in schema if one in narrowing and one not in handled), None)
    if found:
        refuse(found)


def refuse(keyword: str) -> NoReturn:
    """Raises `Refused`, naming the keyword of a schema."""
    raise unsupported("tools", f"{keyword} cannot be enforced where this model's format has to be forced")


def rooted(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same schema with the properties that it names at its root, if it does so by one `$ref` or `allOf`."""
    return with_required(resolved(schema, schema))


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same schema with what it says by one `$ref` or `allOf`. `root`: that of its references."""
    for _ in range(MOST_STEPS):
        inner = _inner(schema, root)
        if inner is None or not _narrowing(schema) <= {"$ref", "allOf", "type"}:
            break
        schema = {**inner, **{name: one for name, one in schema.items() if name not in ("$ref", "allOf")}}
    return schema


def parameter_of(tool: Tool | None, key: str) -> Mapping[str, Any]:
    """The schema of a tool's parameter; empty if there is none."""
    schema = members_of(tool.parameters).get(key) if tool else None
    return schema if isinstance(schema, Mapping) else {}


def with_required(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of an object, with all properties that it requires among its properties."""
    members, others = members_of(schema), schema.get("additionalProperties", True)
    missing = [one for one in required_of(schema) if one not in members]
    if not missing or others is False or "patternProperties" in schema:
        return schema
    inner = others if isinstance(others, Mapping) else {}
    return {**schema, "properties": {**members, **dict.fromkeys(missing, inner)}}


def members_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of an object's properties."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> list[str]:
    """The names of the properties that an object must have."""
    found = schema.get("required")
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def check_members(schema: Mapping[str, Any]) -> None:
    """Raises `Refused` if an object is narrowed by more than its members, or requires one that it may not have."""
    refuse_others(schema, {*MEMBERS, "type"}, "object")
    members = members_of(schema)
    if any(members.get(one, False) is False for one in required_of(schema)):
        refuse("required")


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema allows; None if it does not list them."""
    if "const" in schema and "enum" not in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def referred(pointer: Any, root: Mapping[str, Any]) -> Any:
    """What a reference inside a schema means; None if there is nothing."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    found: Any = root
    for part in pointer[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def text_body(schema: Mapping[str, Any]) -> str:
    """Lark text of the strings that a schema allows, without quotes: patterns joined by `&`. Raises `Refused`."""
    refuse_others(schema, {"type", *OF_TYPE["string"]}, "string")
    parts = [pattern for pattern in (_length(schema), _pattern(schema), _format(schema)) if pattern]
    return " & ".join(parts) or ANY_TEXT


def _length(schema: Mapping[str, Any]) -> str:
    least, most = number_of(schema, "minLength"), number_of(schema, "maxLength")
    if least is None and most is None:
        return ""
    return rf"/(.|\n){{{least or 0},{'' if most is None else most}}}/"


def number_of(schema: Mapping[str, Any], keyword: str) -> int | None:
    """The number under a keyword that limits a length. Raises `Refused` if it is none."""
    found = schema.get(keyword)
    if found is not None and (type(found) is not int or found < 0):
        refuse(keyword)
    return found


def _pattern(schema: Mapping[str, Any]) -> str:
    """A schema's pattern, which may match anywhere unless it is anchored, as one that matches all of a text."""
    pattern = schema.get("pattern")
    if pattern is None:
        return ""
    if not _is_regex(pattern):
        refuse("pattern")
    starts, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    if (starts or ends) and "|" in pattern:  # an anchor may belong to one alternative alone
        refuse("pattern")
    body = re.sub(r"\\.|/", lambda one: CLASSES.get(one[0], one[0]), pattern[starts : len(pattern) - ends])
    body = body.replace("\n", r"\n")
    return f"/{'' if starts else ANY_TEXT[1:-1]}({body}){'' if ends else ANY_TEXT[1:-1]}/"


def _is_regex(pattern: Any) -> bool:
    try:
        re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError):
        return False
    return isinstance(pattern, str)


def _format(schema: Mapping[str, Any]) -> str:
    name = schema.get("format")
    if name is None:
        return ""
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        refuse("format")
    return f"/{found}/"


def _inner(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that this one refers to, if it is one and inside the root."""
    every = schema.get("allOf")
    if "$ref" in schema and every is None:
        found = referred(schema["$ref"], root)
    else:
        found = every[0] if isinstance(every, list) and len(every) == 1 and "$ref" not in schema else None
    return found if isinstance(found, Mapping) else None


def _narrowing(schema: Mapping[str, Any]) -> set[str]:
    return {one for one in schema if one in ANY_TYPE.union(*OF_TYPE.values())}
