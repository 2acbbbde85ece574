"""Formats of thinking and tool calls: any split of a reply tells the same, nothing is lost, and grammars that force
calls allow nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from server.openai.formats.format import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Format,
    Reasoning,
    Tool,
    joined,
)
from server.openai.formats.known import BY_NAME, format_of
from server.openai.formats.reading import Known, parser_of
from server.openai.formats.xml_call import as_json
from tests.http.fake import INFO

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
    Sample("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]aB3[ARGS]{ARGUMENTS}[TOOL_CALLS]ping{{}}", "", "", ""),
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
