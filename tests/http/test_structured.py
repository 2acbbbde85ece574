"""Structured output: every way to ask for it becomes one grammar, and what cannot be is refused before the engine
hears of it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from slipstream.engine.api import Grammar
from slipstream.engine.errors import InvalidRequest
from tests.http.fake import INFO, delta, done
from tests.http.serving import Served

HI = [{"role": "user", "content": "Hi there"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANY_OBJECT = {"type": "object"}
THINKING = '{{ messages }}{{ tools }}<think></think><tool_call>{"name", "arguments"}'
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


class Answer(BaseModel):
    a: int


def grammar_of(server: Served, path: str = "/v1/chat/completions", **fields: Any) -> Grammar | None:
    body = {"messages": HI} if "chat" in path else {"prompt": "a"}
    answer = server.post(path, {**body, **fields})
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1].grammar


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": FORMAT}, SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            SCHEMA,
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, {}),
        ({"json_schema": SCHEMA}, SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, SCHEMA),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"json": SCHEMA, "disable_fallback": False, "_backend": None}}, SCHEMA),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_json(server: Served, path: str, fields: dict[str, Any], schema: dict[str, Any]) -> None:
    grammar = grammar_of(server, path, **fields)
    assert grammar is not None
    assert (grammar.kind, grammar.param, grammar.reasoning) == ("json_schema", next(iter(fields)), None)
    assert json.loads(grammar.source) == schema


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_choice": ["yes", 'n"o']}, "lark", 'start: "yes" | "n\\"o"\n'),
        ({"structured_outputs": {"choice": ["yes"]}}, "lark", 'start: "yes"\n'),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"grammar": 'start: "::="'}, "lark", 'start: "::="'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'start: "a"'}, "lark", 'start: "a"'),
    ],
)
def test_other_ways(server: Served, fields: dict[str, Any], kind: str, source: str) -> None:
    assert grammar_of(server, **fields) == Grammar(kind, source, None, next(iter(fields)))


@pytest.mark.parametrize("name", ["grammar", "ebnf"])
def test_gbnf_becomes_lark(server: Served, name: str) -> None:
    import llguidance
    from tokenizers import Tokenizer

    grammar = grammar_of(server, **{name: 'root ::= answer "!"\nanswer ::= "yes" | "no" [0-9]+\n'})
    assert grammar is not None
    assert grammar.kind == "lark"
    text = Tokenizer.from_file("demo/target/tokenizer.json")
    for reply, fits in (("yes!", True), ("no42!", True), ("no!", False), ("yes", False)):
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer(text.to_str()), llguidance.LLMatcher.grammar_from_lark(grammar.source)
        )
        ids = text.encode(reply).ids
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, reply


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "grammar": ""},
        {"guided_choice": [], "structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_what_asks_for_nothing(server: Served, fields: dict[str, Any]) -> None:
    assert grammar_of(server, **fields) is None


def test_thinking_comes_first(server: Served) -> None:
    server.engine.info = replace(INFO, chat_template=THINKING)
    try:
        grammar = grammar_of(server, response_format=FORMAT)
        assert grammar is not None
        assert grammar.reasoning == ("<think>", "</think>")
        tool = {"type": "function", "function": {"name": "ping"}}
        both = grammar_of(server, response_format=FORMAT, tools=[tool])
        assert both is not None
        assert (both.kind, both.param, both.reasoning) == ("lark", "response_format", ("<think>", "</think>"))
        assert both.source.startswith("start: calls | answer\nanswer: %json ")
        completion = grammar_of(server, "/v1/completions", response_format=FORMAT)
        assert completion is not None
        assert completion.reasoning is None
    finally:
        server.engine.info = INFO


def test_the_clients_helpers(client: OpenAI, server: Served) -> None:
    server.engine.script = lambda request: [delta('{"a"', None), delta(": 4"), delta("2}"), done(request, 3)]
    parsed = client.chat.completions.parse(model="m", messages=HI, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(a=42)
    grammar = server.engine.requests[-1].grammar
    assert json.loads(grammar.source)["required"] == ["a"]
    with client.chat.completions.stream(model="m", messages=HI, response_format=Answer) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Answer(a=42)
    server.engine.script = lambda request: [delta('{"a"'), done(request, 1, "length")]
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="m", messages=HI, response_format=Answer)


def test_the_same_under_several_names(server: Served) -> None:
    """guidance does so, for vLLM of before and after a change of names."""
    gbnf = 'root ::= "a" | "b"'
    both = {"guided_grammar": gbnf, "structured_outputs": {"grammar": gbnf}}
    assert grammar_of(server, **both) == grammar_of(server, guided_grammar=gbnf)
    error = server.error(400, **{**both, "guided_grammar": 'root ::= "a"'})
    assert error["message"] == "structured_outputs: cannot be combined with guided_grammar"


def test_what_the_engine_cannot_compile(client: OpenAI, server: Served) -> None:
    server.engine.refusal = InvalidRequest("response_format", "not a usable grammar: no such type")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=HI, response_format=FORMAT, stream=stream)
        assert (caught.value.param, caught.value.code) == ("response_format", "invalid_value")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


BAD = "invalid_value"
UNSUPPORTED = "unsupported_value"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "json"}, "response_format", BAD),
        ({"response_format": {}}, "response_format", BAD),
        ({"response_format": {"type": "xml"}}, "response_format", UNSUPPORTED),
        ({"response_format": {"type": "json_schema"}}, "response_format", BAD),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format", BAD),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "response_format", BAD),
        ({"response_format": {"type": "json_object", "schema": nested(65)}}, "response_format", BAD),
        ({"json_schema": nested(200)}, "json_schema", BAD),
        ({"json_schema": "{"}, "json_schema", BAD),
        ({"json_schema": "[" * 70_000}, "json_schema", BAD),
        ({"guided_json": {"description": "x" * 70_000}}, "guided_json", BAD),
        ({"guided_regex": 1}, "guided_regex", BAD),
        ({"guided_regex": "é" * 40_000}, "guided_regex", BAD),
        ({"guided_choice": "yes"}, "guided_choice", BAD),
        ({"guided_choice": ["yes", 1]}, "guided_choice", BAD),
        ({"guided_choice": [""]}, "guided_choice", BAD),
        ({"guided_choice": ["x"] * 1025}, "guided_choice", BAD),
        ({"grammar": "root ::= ("}, "grammar", BAD),
        ({"grammar": "root ::= other"}, "grammar", BAD),
        ({"grammar": "root ::= " + "(" * 30_000}, "grammar", BAD),
        ({"grammar": 'root ::= "' + "x" * 17_000 + '"'}, "grammar", BAD),
        ({"grammar": "root ::= " + "(" * 10_000}, "grammar", BAD),
        ({"grammar": 7}, "grammar", BAD),
        ({"grammar_lazy": True}, "grammar_lazy", UNSUPPORTED),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", UNSUPPORTED),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", BAD),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", UNSUPPORTED),
        ({"structured_outputs": []}, "structured_outputs", BAD),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", BAD),
        ({"response_format": FORMAT, "guided_json": {}}, "guided_json", BAD),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "grammar", BAD),
    ],
)
def test_what_is_refused(server: Served, fields: dict[str, Any], param: str, code: str) -> None:
    error = server.error(400, **fields)
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"].startswith(param)
    assert len(error["message"]) < 300
    assert "xxx" not in error["message"]
    assert not server.engine.requests


def test_the_deepest_schema_that_may_be(server: Served) -> None:
    assert grammar_of(server, json_schema=nested(64)) is not None
