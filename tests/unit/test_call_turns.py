"""Turns that call tools, as templates take them: without content, and with content beside thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.api import Chat
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.text.chat import ChatTemplate
from slipstream.engine.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "demo" / "target"
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ASKED = {"role": "user", "content": "x"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "seen"}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
]

NAMES = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"
WRITES = "{% for m in messages %}[{{ m.content }}]" + NAMES + "{% endfor %}"  # as GLM-4.6, MiniMax-M2
AS_JSON = "{% for m in messages %}[{{ m.content | tojson }}]" + NAMES + "{% endfor %}"  # as LFM2
WANTS_TOOLS = (
    "{% if messages[1].tool_calls %}{{ tools[0].function.name }}:{% endif %}" + WRITES
)  # as Command R+
LOOKS_BACK = (  # as QwQ, which drops the thinking of turns before the last
    "{% for m in messages %}[{% if m.content and loop.last %}{{ m.content }}"
    "{% elif not loop.last %}{{ m.content.split('</think>')[-1] }}{% endif %}]" + NAMES + "{% endfor %}"
)
NOTICES = (
    "{% for m in messages %}[{{ 'nothing' if m.content is none else m.content }}]" + NAMES + "{% endfor %}"
)
# As gpt-oss: thoughts before the call, or else the content; not both.
ONE_OF_BOTH = """
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
        {%- if '<|' in m.content %}{{ raise_exception('markers') }}{% endif %}
        {{- '(' + (m.thinking or m.content) + ')<' + m.tool_calls[0].function.name + '>' }}
    {%- else %}{{ '[' + m.content + ']' }}{% endif %}
{%- endfor %}"""
BOTH = (
    "{% for m in messages %}{% if m.thinking %}({{ m.thinking }}){% endif %}[{{ m.content }}]"
    + NAMES
    + "{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


def rendered(source: str, tokenizer: Tokenizer, *turns: Mapping[str, Any]) -> str:
    chat = Chat([ASKED, *turns], {"tools": TOOLS}, add_generation_prompt=False)
    return ChatTemplate({"default": source}, tokenizer, "test").render(chat)


def called(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [CALL], **more}


@pytest.mark.parametrize("source", [WRITES, AS_JSON, WANTS_TOOLS, LOOKS_BACK], ids=range(4))
def test_no_content_is_none_in_the_prompt_too(source: str, tokenizer: Tokenizer) -> None:
    """Neither as a word, `None` or `null`, nor as a refusal once a result follows."""
    of_null, of_empty = (rendered(source, tokenizer, called(one), RESULT) for one in (None, ""))
    assert of_null == of_empty


def test_a_template_that_tells_null_from_empty_gets_null(tokenizer: Tokenizer) -> None:
    assert rendered(NOTICES, tokenizer, called(None), RESULT) == "[x][nothing]<look>[seen]"


@pytest.mark.parametrize("source", [WRITES, AS_JSON, NOTICES], ids=range(3))
def test_a_turn_without_calls_has_empty_content(source: str, tokenizer: Tokenizer) -> None:
    """Such as one that only thought."""
    of_null, of_empty = (
        rendered(source, tokenizer, {"role": "assistant", "content": one, "reasoning_content": "hm"}, ASKED)
        for one in (None, "")
    )
    assert of_null == of_empty


@pytest.mark.parametrize("content", ["I look.", [{"type": "text", "text": "I look."}]], ids=["text", "parts"])
def test_content_beside_thoughts_where_a_template_refuses_both(content: Any, tokenizer: Tokenizer) -> None:
    turn = called(content, reasoning_content="hm")
    assert rendered(ONE_OF_BOTH, tokenizer, turn, RESULT) == "[x](hm\n\nI look.)<look>[seen]"
    assert rendered(BOTH, tokenizer, turn, RESULT) == "[x](hm)[I look.]<look>[seen]"


@pytest.mark.parametrize(
    ("content", "thoughts", "shown"),
    [("I look.", None, "I look."), ("I look.", "", "I look."), (None, "hm", "hm"), ("", "hm", "hm")],
)
def test_one_of_both_stays_as_it_is(
    content: str | None, thoughts: str | None, shown: str, tokenizer: Tokenizer
) -> None:
    turn = called(content, reasoning_content=thoughts)
    assert rendered(ONE_OF_BOTH, tokenizer, turn, RESULT) == f"[x]({shown})<look>[seen]"


def test_a_refusal_with_another_reason_stays_one(tokenizer: Tokenizer) -> None:
    refuses = "{% for m in messages %}{% if m.thinking %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="no"):
        rendered(refuses, tokenizer, called("I look.", reasoning_content="hm"), RESULT)
