"""Forced calls in formats that do not spell arguments as JSON: all of a schema is enforced, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from slipstream.server.http.error_table import Refused
from slipstream.server.openai.formats.format import Tool
from slipstream.server.openai.formats.known import BY_NAME
from slipstream.server.openai.formats.reading import Known
from slipstream.server.openai.tools import ToolChoice, asked
from tests.unit.test_formats import accepts

DEMO = Path(__file__).parents[2] / "demo" / "target"
FORMATS = ("qwen3-coder", "glm", "gemma4")


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def tool_of(parameters: dict[str, Any]) -> Tool:
    """The tool of a request."""
    shown = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return asked(shown, ToolChoice("required"), many=False).tools["f"]


def of_gemma(value: Any) -> str:
    """A value as Gemma 4 writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{of_gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(of_gemma, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def spelt(name: str, arguments: dict[str, Any]) -> str:
    """A call with these arguments in a format."""
    if name == "gemma4":
        return f"<|tool_call>call:f{of_gemma(arguments)}<tool_call|>"
    texts = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
    if name == "glm":
        body = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in texts.items())
        return f"<tool_call>f\n{body}</tool_call>"
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def of_text(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"s": {"type": "string", **keywords}}, "required": ["s"]}


INNER = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}


def of_value(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"]}


TREE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["n"],
}
PAIR = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}
ENFORCED = {
    "pattern": (of_text(pattern="^[0-9]{3}$"), [{"s": "123"}], [{"s": "1234"}, {"s": "x"}]),
    "pattern anywhere": (of_text(pattern=r"a/\d"), [{"s": "xa/1\ny"}], [{"s": "a/"}, {"s": "a/٣"}]),
    "alternatives": (of_text(pattern="ab|cd"), [{"s": "xcd"}], [{"s": "ad"}]),
    "lengths": (of_text(minLength=2, maxLength=3), [{"s": "é\n"}, {"s": "abc"}], [{"s": "a"}, {"s": "abcd"}]),
    "both": (of_text(pattern="^[a-z]+$", maxLength=2), [{"s": "ab"}], [{"s": "abc"}, {"s": "1"}]),
    "date": (of_text(format="date"), [{"s": "2026-02-28"}], [{"s": "tomorrow"}, {"s": "2026-13-01"}]),
    "date-time": (of_text(format="date-time"), [{"s": "2026-02-28T10:00:00Z"}], [{"s": "2026-02-28"}]),
    "uuid": (of_text(format="uuid"), [{"s": "123e4567-e89b-12d3-a456-426614174000"}], [{"s": "1"}]),
    "email": (of_text(format="email"), [{"s": "a.b@c.de"}], [{"s": "a.b"}]),
    "const": (of_text(const="x"), [{"s": "x"}], [{"s": "y"}]),
    "a reference": ({"$ref": "#/$defs/A", "$defs": {"A": INNER}}, [{"s": "x"}], [{}]),
    "one of all": ({"type": "object", "allOf": [INNER]}, [{"s": "x"}], [{}]),
    "required": (
        {"required": ["q"], "additionalProperties": {"type": "integer"}},
        [{"q": 1}],
        [{}, {"q": "x"}],
    ),
    "bounds": (of_value(type="integer", minimum=1, maximum=5), [{"v": 3}], [{"v": 99}, {"v": 0}]),
    "items": (of_value(**PAIR), [{"v": [1]}, {"v": [1, 2]}], [{"v": []}, {"v": [1, 2, 3]}]),
    "one item": (of_value(type="array", items={}, maxItems=1), [{"v": []}, {"v": ["a"]}], [{"v": [1, 2]}]),
    "or null": (of_value(anyOf=[PAIR, {"type": "null"}]), [{"v": None}, {"v": [1]}], [{"v": []}, {"v": 1}]),
    "values": (of_value(enum=[1, "a", None]), [{"v": 1}, {"v": None}], [{"v": 2}, {"v": True}]),
    "a map": (
        of_value(type="object", additionalProperties={"type": "integer"}),
        [{"v": {}}, {"v": {"a": 1, "b": 2}}],
        [{"v": {"a": True}}],
    ),
    "itself": (
        {**of_value(**{"$ref": "#/$defs/tree"}), "$defs": {"tree": TREE, "same": {"$ref": "#/$defs/tree"}}},
        [{"v": {"n": 1, "of": [{"n": 2, "of": [{"n": 3}]}]}}],
        [{"v": {"n": 1, "of": [{"n": 2, "of": [{"n": "x"}]}]}}, {"v": {}}],
    ),
    "references in a row": (
        {**of_value(**{"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/b"}, "b": PAIR}},
        [{"v": [1]}],
        [{"v": []}],
    ),
    "forbidden": ({"type": "object", "properties": {"s": False}}, [{}], [{"s": "x"}]),
}
REFUSED = {
    "anyOf": {"type": "object", "anyOf": [INNER, {"required": ["b"]}]},
    "allOf": {"allOf": [INNER, {"required": ["b"]}]},
    "$ref": {"$ref": "https://example.com/x.json"},
    "minProperties": {**INNER, "minProperties": 1},
    "required": {"type": "object", "required": ["q"], "additionalProperties": False},
    "format": of_text(format="regex"),
    "pattern": of_text(pattern="^a|b$"),
    "minLength": of_text(minLength="1}/ x: /{1"),
    "maxLength": of_text(enum=["a", "bb"], maxLength=1),
    "not": of_text(**{"not": {"const": "a"}}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", ENFORCED)
def test_what_is_enforced(case: str, name: str, vocabulary: Tokenizer) -> None:
    parameters, good, bad = ENFORCED[case]
    grammar = Known(BY_NAME[name]).forced([tool_of(parameters)], many=False)
    assert all(accepts(grammar, spelt(name, one), vocabulary) for one in good)
    assert not any(accepts(grammar, spelt(name, one), vocabulary) for one in bad)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("keyword", REFUSED)
def test_what_is_refused_by_name(keyword: str, name: str) -> None:
    with pytest.raises(Refused) as refused:
        Known(BY_NAME[name]).forced([tool_of(REFUSED[keyword])], many=False)
    assert refused.value.message.startswith(f"tools: {keyword} ")
    Known(BY_NAME["hermes"]).forced([tool_of(REFUSED[keyword])], many=False)  # JSON, which the engine judges


GEMMA_REFUSES = {
    "uniqueItems": of_value(type="array", uniqueItems=True),
    "prefixItems": of_value(type="array", prefixItems=[{"const": 1}]),
    "oneOf": of_value(oneOf=[{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 0}]),
    "patternProperties": of_value(type="object", patternProperties={"a": {}}),
    "minProperties": of_value(type="object", minProperties=1),
    "minimum": of_value(minimum=1),
    "$ref": of_value(**{"$ref": "#/$defs/none"}),
    "not": of_value(**{"not": {}}),
}


@pytest.mark.parametrize("keyword", GEMMA_REFUSES)
def test_what_is_refused_inside_values_that_are_no_json(keyword: str) -> None:
    with pytest.raises(Refused, match=f"tools: {re.escape(keyword)} cannot be enforced"):
        Known(BY_NAME["gemma4"]).forced([tool_of(GEMMA_REFUSES[keyword])], many=False)


def test_tools_of_any_values_stand_side_by_side(vocabulary: Tokenizer) -> None:
    one = of_value()
    tools = [Tool(name, one) for name in ("f", "g")]
    grammar = Known(BY_NAME["gemma4"]).forced(tools, many=False)
    assert accepts(grammar, spelt("gemma4", {"v": {"a": [1]}}), vocabulary)
