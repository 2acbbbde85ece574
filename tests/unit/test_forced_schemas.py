"""Forced calls in formats that do not spell arguments as JSON: all of a schema is enforced, or refused by name."""

from __future__ import annotations

import json
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
FORMATS = ("qwen3-coder", "glm")


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def tool_of(parameters: dict[str, Any]) -> Tool:
    """The tool of a request."""
    shown = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return asked(shown, ToolChoice("required"), many=False).tools["f"]


def spelt(name: str, arguments: dict[str, Any]) -> str:
    """A call with these arguments in a format."""
    texts = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
    if name == "glm":
        body = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in texts.items())
        return f"<tool_call>f\n{body}</tool_call>"
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def of_text(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"s": {"type": "string", **keywords}}, "required": ["s"]}


INNER = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
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
    assert refused.value.problem.message.startswith(f"tools: {keyword} ")
    Known(BY_NAME["hermes"]).forced([tool_of(REFUSED[keyword])], many=False)  # JSON, which the engine judges
