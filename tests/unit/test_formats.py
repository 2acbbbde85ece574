"""Formats of thinking and tool calls: any split of a reply tells the same, nothing is lost, and grammars that force
calls allow nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from slipstream.engine.api import Chat
from slipstream.engine.text import tokenizer as text_tokenizer
from slipstream.engine.text.chat import ChatTemplate, load_chat_template
from slipstream.server.openai.formats.format import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Format,
    Reasoning,
    Tool,
    joined,
)
from slipstream.server.openai.formats.known import BY_NAME, format_of
from slipstream.server.openai.formats.reading import Known, parser_of
from slipstream.server.openai.formats.renderings import FIRST, Renderings
from slipstream.server.openai.formats.xml_call import as_json
from tests.http.fake import INFO

DEMO = Path(__file__).parents[2] / "demo"
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
PING = Tool("ping", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = {one.name: one for one in (WEATHER, PING)}
ARGUMENTS = '{"city": "Oslo é 😀", "days": 2}'


@dataclass(frozen=True)
class Sample:
    """A reply of one format that thinks, says something and calls two tools."""

    format: str
    text: str
    tail: str = ""
    reasoning: str = "I think\nso"
    content: str = "Let me see."
    calls: tuple[tuple[str, str], ...] = (("get_weather", ARGUMENTS), ("ping", "{}"))


SAMPLES = [
    Sample(
        "hermes",
        "<think>\nI think\nso\n</think>\n\nLet me see.\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    ),
    Sample(
        "qwen3-coder",
        "I think\nso\n</think>\n\nLet me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo é 😀\n"
        "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=ping>\n"
        "</function>\n</tool_call>",
        tail="<|im_start|>assistant\n<think>\n",
    ),
    Sample(
        "llama3",
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "ping", "parameters": {{}}}}',
        reasoning="",
        content="",
    ),
    Sample(
        "llama3",
        f'Let me see.<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
        '\n{"type": "function", "name": "ping", "parameters": {}}',
        reasoning="",
    ),
    Sample(
        "mistral",
        f"[THINK]I think\nso[/THINK]Let me see.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]ping[ARGS]{{}}",
    ),
    Sample(
        "mistral", f"[TOOL_CALLS]get_weather[CALL_ID]aB3[ARGS]{ARGUMENTS}[TOOL_CALLS]ping{{}}", "", "", ""
    ),
    Sample(
        "mistral-list",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}, "id": "aB3dE6gH9"}}, '
        '{"arguments": {}, "name": "ping"}]',
        reasoning="",
        content="",
    ),
    Sample(
        "deepseek",
        "<think>\nI think\nso\n</think>\n\nLet me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"get_weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    Sample(
        "deepseek-v3.1",
        "I think\nso</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        tail="<｜Assistant｜><think>",
    ),
    Sample(
        "glm",
        "\n<think>I think\nso</think>\nLet me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
        "Oslo é 😀</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>ping"
        "</tool_call>",
    ),
    Sample(
        "gemma4",
        "<|channel>thought\nI think\nso\n<channel|>Let me see.<|tool_call>call:get_weather{city:"
        '<|"|>Oslo é 😀<|"|>,days:2}<tool_call|><|tool_call>call:ping{}<tool_call|><|tool_response>',
    ),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>I think\nso<|end|><|start|>assistant<|channel|>commentary<|message|>Let me "
        "see.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        f"{ARGUMENTS}<|call|><|start|>assistant<|channel|>commentary to=functions.ping <|constrain|>json<|message|>"
        "{}",
        tail="<|start|>assistant",
    ),
    Sample("plain", "<think>I think\nso</think> Let me see.", calls=()),
]
IDS = [f"{i}-{one.format}" for i, one in enumerate(SAMPLES)]


def pieces(name: str, parts: Sequence[str], tail: str = "", **more: Any) -> list[Any]:
    """What the parts of a reply are told as, neighbours joined."""
    parser = parser_of(BY_NAME[name], more.pop("tools", TOOLS), tail, **more)
    return joined([*(piece for part in parts for piece in parser.feed(part)), *parser.finish()])


def sum_of(told: Sequence[Any], kind: type) -> str:
    return "".join(one.text for one in told if isinstance(one, kind))


def calls_of(told: Sequence[Any]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for one in told:
        if isinstance(one, CallStart):
            calls.append((one.name, ""))
        elif isinstance(one, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + one.text)
    return calls


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_a_reply_in_one_piece(sample: Sample) -> None:
    told = pieces(sample.format, [sample.text], sample.tail)
    assert sum_of(told, Reasoning) == sample.reasoning
    assert sum_of(told, Content) == sample.content
    assert calls_of(told) == list(sample.calls)
    assert len([one for one in told if isinstance(one, CallEnd)]) == len(sample.calls)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_split_at_every_place(sample: Sample) -> None:
    whole = pieces(sample.format, [sample.text], sample.tail)
    for i in range(1, len(sample.text)):
        assert pieces(sample.format, [sample.text[:i], sample.text[i:]], sample.tail) == whole, i
    assert pieces(sample.format, list(sample.text), sample.tail) == whole


MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|channel|>",
    "<|message|>",
)
SCRAPS = st.sampled_from(
    [
        *MARKERS,
        *(
            "<|start|>",
            "<|end|>",
            "<|python_tag|>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        *(
            "<function=ping>",
            "</function>",
            "<parameter=a>",
            "</parameter>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
        ),
        *(
            "</arg_value>",
            '{"name": "ping"',
            ', "arguments": ',
            '{"a": 1}',
            "{}",
            "}",
            "{",
            '"',
            "\\",
            "[",
            "]",
            ",",
        ),
        *(
            "ping",
            "<｜tool▁sep｜>",
            "analysis",
            " to=functions.ping",
            "<|tool_call>call:ping{",
            '<|"|>',
            "a:1,",
            "[{",
            "}<tool_call|>",
            "<",
            "</",
            "\n",
            "  ",
            "é",
            "some words",
        ),
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(BY_NAME)),
    scraps=st.lists(SCRAPS, max_size=12),
    tail=st.sampled_from(["", "<think>\n", "<|start|>assistant"]),
    cuts=st.lists(st.integers(1, 40), max_size=12),
)
def test_any_text_split_anywhere(name: str, scraps: list[str], tail: str, cuts: list[int]) -> None:
    text = "".join(scraps)
    parts, rest = [], text
    for cut in cuts:
        parts.append(rest[:cut])
        rest = rest[cut:]
    told = pieces(name, [text], tail)
    assert pieces(name, [*parts, rest], tail) == told
    if name != "harmony" and not any(isinstance(one, CallStart | Reasoning) for one in told):
        # Nothing was understood, so all of it is content, but for markers that say nothing by themselves.
        silent = (*BY_NAME[name].between, *(BY_NAME[name].reasoning or ()))
        assert squeezed(sum_of(told, Content), silent) == squeezed(text, silent)


def squeezed(text: str, without: Sequence[str]) -> str:
    for one in without:
        text = text.replace(one, "")
    return "".join(text.split())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\nping me\n</tool_call> tail"),
        ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ping", "arguments": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ping", "wrong": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ping"'),
        ("llama3", '{"answer": {"name": "ping"}}'),
        ("llama3", '{"name": "nobody", "parameters": {}}'),
        ("llama3", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS]ping"),
        ("mistral-list", "[TOOL_CALLS] [1, 2]"),
        ("deepseek", "<｜tool▁call▁begin｜>two words<｜tool▁call▁end｜> tail"),
        ("glm", "<tool_call>two words</tool_call>"),
        ("glm", "<tool_call>nobody</tool_call>"),
        ("glm", "<tool_call>ping\n<arg_key>a</arg_key>oops<arg_value>b</arg_value></tool_call>"),
        ("qwen3-coder", "<tool_call>\n<function=ping>\n</tool_call"),
        ("qwen3-coder", "<tool_call>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        ("gemma4", "<|tool_call>ping<tool_call|> tail"),
        ("gemma4", "<|tool_call>call:two words{}<tool_call|>"),
        ("harmony", "no header at all"),
        ("none", "<think>x</think><tool_call>{}</tool_call>"),
    ],
)
def test_malformed_calls_are_content(name: str, text: str) -> None:
    for parts in ([text], list(text)):
        assert pieces(name, parts) == [Content(text)]


def test_what_follows_a_call_is_content() -> None:
    text = '<tool_call>{"name": "ping", "arguments": {}} oops</tool_call> tail'
    told = pieces("hermes", [text])
    assert calls_of(told) == [("ping", "{}")]
    assert sum_of(told, Content) == "oops</tool_call> tail"


def test_markers_in_strings_are_text() -> None:
    arguments = '{"city": "</tool_call> <tool_call> \\" }", "days": 1}'
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>x'
    for parts in ([text], list(text)):
        told = pieces("hermes", parts)
        assert calls_of(told) == [("get_weather", arguments)]
        assert sum_of(told, Content) == "x"


def test_arguments_come_as_they_are_written() -> None:
    parser = parser_of(BY_NAME["hermes"], TOOLS, "")
    assert parser.feed('<tool_call>{"name": "get_weather", "argum') == []
    assert parser.feed('ents": {"city": "Os') == [CallStart("get_weather"), CallArguments('{"city": "Os')]
    assert parser.feed("lo") == [CallArguments("lo")]


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_a_cut_call_does_not_end(sample: Sample) -> None:
    """Wherever a reply is cut, calls that were told as ended have arguments that are JSON."""
    for i in range(len(sample.text)):
        told = pieces(sample.format, [sample.text[:i]], sample.tail)
        ended = calls_of(told)[: len([one for one in told if isinstance(one, CallEnd)])]
        assert ended == list(sample.calls[: len(ended)]), i


def test_arguments_before_the_name_and_as_a_string() -> None:
    for arguments in ('{"a": 1}', '"{\\"a\\": 1}"'):
        for text in (
            f'{{"arguments": {arguments}, "name": "ping"}}',
            f'{{"name": "ping", "arguments": {arguments}}}',
        ):
            assert calls_of(pieces("hermes", [f"<tool_call>{text}</tool_call>"])) == [("ping", '{"a": 1}')]
    assert calls_of(pieces("hermes", ['<tool_call>{"name": "ping"}</tool_call>'])) == [("ping", "{}")]


def test_thinking_opens_only_a_reply() -> None:
    assert pieces("plain", ["a <think>b</think>"]) == [Content("a <think>b</think>")]
    assert pieces("plain", ["<think></think>", "\n\n", "a"]) == [Content("a")]
    assert pieces("plain", ["b</think>a"], "x<think></think>") == [Content("b</think>a")]
    assert pieces("plain", ["b"], "x<think>") == [Reasoning("b")]
    aloud = pieces("plain", ["<think>\nb\n", "</think>\n\na"], thinks_aloud=True)
    assert aloud == [Content("<think>\nb\n</think>\n\na")]
    assert pieces("plain", ["b</think>a"], "x<think>", thinks_aloud=True) == [Content("b</think>a")]


def test_white_space_of_a_plain_reply_is_kept() -> None:
    assert pieces("hermes", [" a ", " b \n"]) == [Content(" a  b \n")]
    assert pieces("hermes", [" \n"]) == [Content(" \n")]


def test_calls_beyond_the_wanted_are_not_told() -> None:
    parser = parser_of(BY_NAME["hermes"], TOOLS, "", most_calls=1)
    call = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    told = parser.feed(call + "\n")
    assert calls_of(told) == [("ping", "{}")]
    assert not parser.is_ended
    assert parser.feed(call) == []
    assert parser.is_ended
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("2", {"type": "integer"}, 2),
        ("2.0", {"type": "integer"}, 2.0),
        ("2.5", {"type": "integer"}, "2.5"),
        ("2", {"type": "string"}, "2"),
        ('"x"', {"type": "string"}, '"x"'),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("NaN", {"type": "number"}, "NaN"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1", {"type": "array"}, "[1"),
        (
            "['it\\'s \"x\"', True, None, {'a': \"b'c\"}]",
            {"type": "array"},
            ['it\'s "x"', True, None, {"a": "b'c"}],
        ),
        ("['a']", {"type": "string"}, "['a']"),
        ("{'a': inf}", {"type": "object"}, "{'a': inf}"),
        ("'a'", {"type": "object"}, "'a'"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("x", {}, "x"),
        ("3", {}, 3),
        ("3", {"enum": ["3", "4"]}, "3"),
        ("3", {"const": "3"}, "3"),
        ("3", {"const": 3}, 3),
        ("3", {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}}, "3"),
        ("3", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": ["3"]}}}, "3"),
        ("3", {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "string"}}}, "3"),
        ("null", {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"const": "x"}}}, None),
        ("3", {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "string"}}}, "3"),
        ("3", {"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "3"),
        ("3", {"allOf": [{"type": "number"}, {"type": "integer"}]}, 3),
        ("3", {"$ref": "#/$defs/missing"}, 3),
        ("3", {"$ref": "other.json#/$defs/a", "$defs": {"a": {"type": "string"}}}, 3),
        ("3", {"$ref": "#"}, 3),
        ("3", {"type": "string", "anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "3"),
        ("[" * 100_000, {}, "[" * 100_000),
    ],
)
def test_parameters_are_read_by_their_schema(text: str, schema: dict[str, Any], value: Any) -> None:
    assert json.loads(as_json(text, schema, schema)) == value


# What chat templates of the families say, in a few words.
EXCERPTS = {
    "hermes": '{{ tools }}<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call> </think>',
    "qwen3-coder": "{{ tools }}<tool_call>\n<function=f>\n<parameter=p>\n</parameter></function></tool_call>",
    "llama3": '<|start_header_id|>Respond in the format {"name": function name, "parameters": {}}. {{ tools }}',
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "mistral-list": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS][",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n </think>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜> </think>",
    "glm": "{{ tools }}<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value></tool_call></think>",
    "gemma4": '{{ tools }}<|tool_call>call:{{ name }}{ {{ key }}:<|"|>{{ value }}<|"|> }<tool_call|>',
    "harmony": "# Valid channels: analysis, commentary, final. <|start|>assistant<|channel|>final<|message|>",
    "plain": "{{ '<think>' }}{{ content.split('</think>')[-1] }}",
    "none": "{{ messages }} <seed:tool_call><function=f><parameter=a>",
}


@pytest.mark.parametrize("name", EXCERPTS)
def test_formats_are_found_by_the_chat_template(name: str) -> None:
    info, seen = replace(INFO, chat_template=EXCERPTS[name]), Renderings({"tools": FIRST})
    found = format_of(info, "auto", seen)
    assert found.name == ("generic" if name in ("none", "plain") else name)
    assert bool(found.reasoning) == ("</think>" in EXCERPTS[name])
    assert format_of(info, "auto", Renderings({"tools": ""})).name == "generic", "has no place for tools"
    assert format_of(info, "none", seen).name == "none"
    assert format_of(replace(INFO, chat_template=None), name, Renderings()).name == name
    assert format_of(replace(INFO, chat_template=None), "auto", Renderings()).name == "none"


def test_thinking_is_looked_for_where_the_model_knows_its_markers() -> None:
    tokens = {"<think>": False, "</think>": False}
    seen = Renderings()
    assert format_of(replace(INFO, chat_template="x"), "hermes", seen).reasoning is None
    assert format_of(replace(INFO, chat_template="x", added_tokens=tokens), "hermes", seen).reasoning


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    """The demo's tokenizer with the markers of all formats as tokens, some of them control tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    markers = sorted({marker for one in BY_NAME.values() for marker in one.markers})
    tokenizer.add_tokens(
        [AddedToken(one, special=one.startswith(("[", "<｜")), normalized=False) for one in markers]
    )
    return tokenizer


def known_of(format_: Format, vocabulary: Tokenizer | None) -> Known:
    if vocabulary is None:
        return Known(format_)
    added = {
        token.content: (number, token.special)
        for number, token in vocabulary.get_added_tokens_decoder().items()
    }
    return Known(
        format_,
        frozenset(text for text, (_, is_control) in added.items() if is_control),
        frozenset(added),
        {text: number for text, (number, _) in added.items()},
    )


@cache
def judge_of(vocabulary: str) -> llguidance.LLTokenizer:
    """The tokenizer as grammars want it, made once."""
    return llguidance.LLTokenizer(vocabulary)


def accepts(grammar: str, text: str, vocabulary: Tokenizer) -> bool:
    """Whether the text is a whole reply under the grammar."""
    tokenizer = judge_of(vocabulary.to_str())
    assert not llguidance.LLMatcher.validate_grammar(
        llguidance.LLMatcher.grammar_from_lark(grammar), tokenizer
    )
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    ids = vocabulary.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


ENFORCED = {
    "hermes": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "\n",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    ),
    "qwen3-coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo é 😀\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "\n",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    ),
    "llama3": (
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
        "; ",
        '{"name": "get_weather", "parameters": {"city": "Oslo", "days": "two"}}',
    ),
    "mistral": (f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", "", '[TOOL_CALLS]get_weather[ARGS]{"city": 1}'),
    "mistral-list": (
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        None,
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {}}]',
    ),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        None,
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    ),
    "glm": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo é 😀</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "\n",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
    ),
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Oslo é 😀<|"|>,days:2}<tool_call|>',
        "",
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>',
    ),
}


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("name", ENFORCED)
def test_forced_calls(name: str, with_tokens: bool, vocabulary: Tokenizer) -> None:
    plain = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    used = vocabulary if with_tokens else plain
    known = known_of(BY_NAME[name], vocabulary if with_tokens else None)
    call, between, wrong = ENFORCED[name]
    one = known.forced([WEATHER, PING], many=False)
    assert accepts(one, call, used)
    assert calls_of(pieces(name, [call])) == [("get_weather", ARGUMENTS)]
    for text in (wrong, "", "Hello", "Hello " + call, call + "Hello", call.replace("get_weather", "rm_rf")):
        assert not accepts(one, text, used), text
    if between is not None and name != "llama3":
        assert not accepts(one, call + between + call, used)
        assert accepts(known.forced([WEATHER, PING], many=True), call + between + call, used)
    assert not accepts(known.forced([PING], many=False), call, used)


NESTED = Tool(
    "plan",
    {
        "type": "object",
        "properties": {
            "stops": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "lat": {"type": "number"}},
                    "required": ["name"],
                },
            },
            "by": {"type": ["string", "null"]},
            "fast": {"type": "boolean"},
            "extra": {},
        },
        "required": ["stops"],
    },
)


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{stops:[]}", {"stops": []}),
        (
            '{by:null,extra:{a:[1,true,{}],b:"x,y:z}"},fast:false,stops:[{lat:-1.5,name:"Å\n"},{name:"B"}]}',
            {
                "by": None,
                "extra": {"a": [1, True, {}], "b": "x,y:z}"},
                "fast": False,
                "stops": [{"lat": -1.5, "name": "Å\n"}, {"name": "B"}],
            },
        ),
        ('{by:"bus",stops:[{name:"<tool_call|>"}]}', {"by": "bus", "stops": [{"name": "<tool_call|>"}]}),
    ],
)
def test_nested_arguments_of_gemma(
    written: str, arguments: dict[str, Any], with_tokens: bool, vocabulary: Tokenizer
) -> None:
    plain = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    call = f"<|tool_call>call:plan{written}<tool_call|>".replace('"', '<|"|>')
    for parts in ([call], list(call)):
        told = calls_of(pieces("gemma4", parts, tools={"plan": NESTED}))
        assert [(name, json.loads(text)) for name, text in told] == [("plan", arguments)]
    forced = known_of(BY_NAME["gemma4"], vocabulary if with_tokens else None).forced([NESTED], many=True)
    used = vocabulary if with_tokens else plain
    if not with_tokens or "<tool_call|>" not in written:  # as a token it cannot be text
        assert accepts(forced, call, used)
        assert accepts(forced, call + call, used)
    for wrong in (call.replace("stops", "stop"), call.replace("]}", "],}"), call.replace("{", "{,", 1)):
        assert not accepts(forced, wrong, used), wrong


def test_a_choice_between_calls_and_json(vocabulary: Tokenizer) -> None:
    from slipstream.server.openai.formats.enforce import or_json

    known = known_of(BY_NAME["hermes"], vocabulary)
    grammar = or_json(
        known.forced([PING], many=True), '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    )
    assert accepts(grammar, '{"a": 1}', vocabulary)
    assert accepts(grammar, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>', vocabulary)
    assert not accepts(grammar, '{"a": "b"}', vocabulary)
    assert not accepts(grammar, "hello", vocabulary)


def test_references_stay_those_of_the_tool(vocabulary: Tokenizer) -> None:
    """Schemas of several tools stand side by side; each one's references mean its own definitions."""
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/x"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    first = Tool("a", {**schema, "$defs": {"x": {"type": "integer"}}})
    second = Tool("b", {**schema, "$defs": {"x": {"type": "boolean"}}})
    for name, text in (
        ("hermes", '<tool_call>\n{{"name": "{}", "arguments": {{"x": {}}}}}\n</tool_call>'),
        ("glm", "<tool_call>{}<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>"),
    ):
        grammar = known_of(BY_NAME[name], vocabulary).forced([first, second], many=False)
        assert accepts(grammar, text.format("a", "1"), vocabulary)
        assert accepts(grammar, text.format("b", "true"), vocabulary)
        assert not accepts(grammar, text.format("a", "true"), vocabulary)


def test_strings_that_are_listed_elsewhere_are_forced_without_quotes(vocabulary: Tokenizer) -> None:
    properties = {
        "a": {"$ref": "#/$defs/mode"},
        "b": {"allOf": [{"$ref": "#/$defs/mode"}]},
        "c": {"const": "2"},
    }
    schema = {"type": "object", "properties": properties, "required": ["a", "b", "c"]}
    tool = Tool("f", {**schema, "$defs": {"mode": {"enum": ["1", "2"]}}})
    grammar = known_of(BY_NAME["glm"], vocabulary).forced([tool], many=False)

    def written(*values: str) -> str:
        pairs = zip("abc", values, strict=True)
        inner = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs)
        return f"<tool_call>f{inner}</tool_call>"

    assert accepts(grammar, written("1", "2", "2"), vocabulary)
    told = calls_of(pieces("glm", [written("1", "2", "2")], tools={"f": tool}))
    assert told == [("f", '{"a": "1", "b": "2", "c": "2"}')]
    for wrong in (("3", "2", "2"), ("1", "3", "2"), ("1", "2", "1"), ('"1"', "2", "2")):
        assert not accepts(grammar, written(*wrong), vocabulary)


def test_schemas_without_an_end_are_read() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(3000):
        deep = {"anyOf": [deep, {"$ref": "#"}, {"$ref": "#/anyOf"}]}
    assert as_json("3", deep, deep) == "3"


# What the demo models were trained on; their template may have grown, but not for a conversation without tools.
TRAINED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("name", ["target", "draft", "hybrid", "hybrid-draft"])
def test_the_demo_template(name: str) -> None:
    tokenizer = text_tokenizer.Tokenizer(DEMO / name)
    template, before = (
        load_chat_template(DEMO / name, tokenizer),
        ChatTemplate({"default": TRAINED}, tokenizer, ""),
    )
    assert template is not None
    turns = [
        {"role": role, "content": f"be {role}\n"}
        for role in ("system", "user", "assistant", "user", "assistant")
    ]
    for chat in (
        Chat(turns[:4]),
        Chat(turns[1:2]),
        Chat(turns, add_generation_prompt=False, continue_final_message=True),
        Chat(turns[:4], {"tools": []}),
    ):
        assert template.encode(chat) == before.encode(chat)
    found = format_of(replace(INFO, chat_template=template.source), "auto", Renderings())
    assert found.name == "hermes"
    # A call in the history is written exactly as one that is forced.
    call = {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    chat = Chat(
        [
            *turns[:2],
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "content": "5"},
        ],
        {
            "tools": [
                {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER.parameters}}
            ]
        },
    )
    text = template.render(chat)
    assert json.dumps(WEATHER.parameters) in text
    written = text.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    assert calls_of(pieces("hermes", [written])) == [("get_weather", ARGUMENTS)] * 2
    plain = Tokenizer.from_file(str(DEMO / name / "tokenizer.json"))
    assert accepts(Known(BY_NAME["hermes"]).forced([WEATHER], many=True), written, plain)
