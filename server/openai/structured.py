"""Structured output: reads the many fields by which clients ask for it, and makes a `Grammar` for the engine.

Nothing is compiled here: the engine does that, off the event loop, and refuses what cannot be compiled.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, Field

from slipstream.engine.constraints import Grammar
from slipstream.server.http.body import wrong
from slipstream.server.http.error_table import bad_field
from slipstream.server.openai import sent
from slipstream.server.openai.schema import MAX_SCHEMA_BYTES, check_size, read_schema

MAX_CHOICES = 1024
MAX_GBNF = 16 << 10  # characters; translation time grows with the square of the rules: 0.2 s at most
ANY_OBJECT = '{"type":"object"}'
WAYS = ("json", "regex", "choice", "grammar", "json_object")  # of vLLM's structured_outputs

LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:))", re.MULTILINE)

Source = tuple[str, str]  # kind and source of a grammar


def read_response_format(value: Any) -> Any:
    """OpenAI's `response_format` as a source; None for plain text.

    `schema` may stand in `json_schema`, as OpenAI has it, or beside `type`, as llama-server has it.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise wrong("Input should be an object with a type")
    kind, inner = value["type"], value.get("json_schema")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise wrong(
            "only the types 'text', 'json_object' and 'json_schema' are supported", code="unsupported_value"
        )
    if inner is not None and not isinstance(inner, dict):
        raise wrong("json_schema should be an object with a schema")
    texts = [(inner or {}).get(name) for name in ("name", "description")]
    if inner and not (
        all(isinstance(one, str | None) for one in texts) and isinstance(inner.get("strict"), bool | None)
    ):
        raise wrong(
            "json_schema should have strings as 'name' and 'description' and true or false as 'strict'"
        )
    schema = (inner or {}).get("schema", value.get("schema"))
    if schema is None and kind == "json_object":
        return "json_schema", ANY_OBJECT
    if schema is None and not (inner and "name" in inner):
        raise wrong("json_schema should be an object with a schema")
    return read_json(schema if schema is not None else {})


def read_json(value: Any) -> Any:
    """A schema, as an object or as JSON text."""
    if value is None:
        return None
    if isinstance(value, str):
        value = _loaded(value)
    return "json_schema", orjson.dumps(read_schema(value)).decode()


def _loaded(text: str) -> Any:
    if len(text) > MAX_SCHEMA_BYTES:
        raise wrong(f"Input should have at most {MAX_SCHEMA_BYTES >> 10} KiB")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise wrong("Input should be a JSON schema, as an object or as JSON text") from None


def read_regex(value: Any) -> Any:
    if value is None or value == "":
        return None
    return "regex", _text(value, "a regular expression")


def read_choice(value: Any) -> Any:
    """A list of strings; the reply must be one of them."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise wrong("Input should be a list of strings that are not empty")
    if len(value) > MAX_CHOICES:
        raise wrong(f"Input should have at most {MAX_CHOICES} strings")
    check_size(value)
    return "lark", "start: " + " | ".join(json.dumps(one) for one in value) + "\n"


def read_grammar(value: Any) -> Any:
    """A grammar in GBNF, as llama-server takes it, or in Lark."""
    if value is None or value == "":
        return None
    text = _text(value, "a grammar in GBNF or Lark")
    if LARK.search(text):
        return "lark", text
    if len(text) > MAX_GBNF:
        raise wrong(f"Input should have at most {MAX_GBNF} characters, or be in Lark")
    return "gbnf", text


def _text(value: Any, what: str) -> str:
    """A string within the limit."""
    if not isinstance(value, str):
        raise wrong(f"Input should be {what}, as a string")
    if len(value.encode()) > MAX_SCHEMA_BYTES:
        raise wrong(f"Input should have at most {MAX_SCHEMA_BYTES >> 10} KiB")
    return value


def read_json_object(value: Any) -> Any:
    if value is None or value is False:
        return None
    if value is not True:
        raise wrong("Input should be true or false")
    return "json_schema", ANY_OBJECT


def read_structured_outputs(value: Any) -> Any:
    """vLLM's newer `structured_outputs`: an object with at most one of WAYS, which says what the reply must be."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong(f"Input should be an object with one of {', '.join(WAYS)}")
    readers: dict[str, Callable[[Any], Any]] = dict(
        zip(WAYS, (read_json, read_regex, read_choice, read_grammar, read_json_object), strict=True)
    )
    # vLLM's own object, sent as it is, has switches beside these, which are false.
    given = {
        name: one
        for name, one in value.items()
        if one is not None and not (one is False and name not in readers)
    }
    if any(name not in readers for name in given):
        raise wrong(f"only {', '.join(WAYS)} are supported", code="unsupported_value")
    found = [source for name, one in given.items() if (source := readers[name](one)) is not None]
    if len(found) > 1:
        raise wrong(f"Input should have one of {', '.join(WAYS)}")
    return found[0] if found else None


Schema = dict[str, Any]
# Types of the fields: each reader returns a source; its second argument is for the OpenAPI document.
ResponseFormat = Annotated[Source | None, BeforeValidator(read_response_format, sent.Format | None)]
JsonSchema = Annotated[Source | None, BeforeValidator(read_json, Schema | str | None)]
GrammarText = Annotated[Source | None, BeforeValidator(read_grammar, str | None)]
Regex = Annotated[Source | None, BeforeValidator(read_regex, str | None)]
Choices = Annotated[
    Source | None, BeforeValidator(read_choice, Annotated[list[str], Field(max_length=MAX_CHOICES)] | None)
]
StructuredOutputs = Annotated[
    Source | None, BeforeValidator(read_structured_outputs, sent.OneConstraint | None)
]

FIELDS = (
    *("response_format", "json_schema", "grammar", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex", "ebnf"),
)


async def translate(wire: Any) -> None:
    """Turn a request's GBNF into Lark, in place. Raises `Refused`.

    This is done in a thread, as a long grammar would hold up the event loop.
    """
    for name in ("grammar", "guided_grammar", "structured_outputs", "ebnf"):
        kind, source = getattr(wire, name) or ("", "")
        if kind == "gbnf":
            setattr(wire, name, ("lark", await asyncio.to_thread(_from_gbnf, source, name)))


def grammar_of(wire: Any, reasoning: tuple[str, str] | None) -> Grammar | None:
    """The grammar that a request asks for in one of `FIELDS`; None if it asks for none. Call `translate` before.

    `reasoning`: markers of a thinking part that may come before. Raises `Refused` if several fields are set, unless
    they say the same: clients send a grammar under vLLM's older and newer name at once.
    """
    given = {name: source for name in FIELDS if (source := getattr(wire, name)) is not None}
    if not given:
        return None
    name, (kind, source) = next(iter(given.items()))
    other = next((one for one in given if given[one] != given[name]), None)
    if other is not None:
        raise bad_field(other, f"cannot be combined with {name}")
    return Grammar(kind, source, reasoning, name)


def _from_gbnf(text: str, param: str) -> str:
    from llguidance import gbnf_to_lark

    try:
        made: str = gbnf_to_lark.gbnf_to_lark(text)
    except Exception:  # noqa: BLE001 - it raises what its parser happens to
        raise bad_field(param, "is neither GBNF nor Lark") from None
    return made
