"""A reply's turn, sent back as it came: with calls that the template can show again, or with nothing but thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slipstream.engine.api import Chat
from slipstream.engine.constraints import Grammar
from tests.http.fake import INFO
from tests.http.serving import Served, served
from tests.http.test_tools import CALL, SECOND, TOOLS, says

# As Llama 3.1's: two calls in one turn are refused.
LONE = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments }}}</tool_call>{% endfor %}{% endfor %}{{ tools }}"
)
MANY = LONE.replace("!= 1", "> 99")


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as one:
        yield one


def shown(server: Served, template: str) -> None:
    server.engine.info = replace(INFO, chat_template=template)
    server.engine.script = says(CALL + "\n" + SECOND)


@pytest.fixture(autouse=True)
def _restored(server: Served) -> Iterator[None]:
    yield
    server.engine.info = INFO


def names(message: dict[str, Any]) -> list[str]:
    return [one["function"]["name"] for one in message["tool_calls"]]


@pytest.mark.parametrize(("template", "wanted"), [(LONE, ["get_weather"]), (MANY, ["get_weather", "ping"])])
def test_as_many_calls_as_the_template_takes(server: Served, template: str, wanted: list[str]) -> None:
    shown(server, template)
    for fields in ({}, {"parallel_tool_calls": True}):
        message = server.chat(tools=TOOLS, **fields).json()["choices"][0]["message"]
        assert names(message) == wanted
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", **message}]
        answer = server.post("/apply-template", {"messages": turns, "tools": TOOLS})
        assert answer.status_code == 200, answer.text


def test_one_call_is_forced_where_the_template_takes_one(server: Served) -> None:
    sources = []
    for template in (LONE, MANY):
        shown(server, template)
        server.chat(tools=TOOLS, tool_choice="required")
        grammar = server.engine.requests[-1].grammar
        assert isinstance(grammar, Grammar)
        sources.append(grammar.source)
    shown(server, MANY)
    server.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    alone = server.engine.requests[-1].grammar
    assert sources[0] == alone.source != sources[1]


def test_calls_told_as_text_are_no_matter_of_the_template(server: Served) -> None:
    """Its turns hold the calls as content (`generic`)."""
    shown(server, LONE.replace("{{ tools }}", ""))
    message = server.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert names(message) == ["get_weather", "ping"]


@pytest.mark.parametrize("turn", [{"content": None}, {}], ids=["null", "missing"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_turn_that_only_thought_has_no_text(server: Served, field: str, turn: dict[str, Any]) -> None:
    asked = {"role": "user", "content": "Hi"}
    thought = {"role": "assistant", **turn, field: "hm"}
    answer = server.post("/apply-template", {"messages": [asked, thought, asked]})
    assert answer.status_code == 200, answer.text
    assert server.chat(messages=[asked, thought, asked]).status_code == 200
    prompt = server.engine.requests[-1].prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize("more", [{"role": "assistant"}, {"role": "user", "reasoning_content": "hm"}])
def test_a_turn_that_says_nothing_at_all_is_refused(server: Served, more: dict[str, Any]) -> None:
    assert server.error(400, messages=[{"content": None, **more}])["param"] == "messages[0].content"


# As Kimi K2's: of a call it shows the id and not the name.
BY_ID = (
    "{% if tools %}{{ tools }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|call|>{{ c.id }}<|with|>{{ c.function.arguments }}<|done|>{% endfor %}"
    "{% if m.tool_call_id %}of {{ m.tool_call_id }}{% endif %}<|end|>{% endfor %}"
)


def test_calls_shown_by_id_are_numbered_through_the_conversation(server: Served) -> None:
    shown(server, BY_ID)
    server.engine.script = says('<|call|>functions.get_weather:0<|with|>{"city": "Oslo"}<|done|>')
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    for _ in range(3):
        message = server.chat(messages=turns, tools=TOOLS).json()["choices"][0]["message"]
        assert names(message) == ["get_weather"]
        turns += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sun"}]
    text = server.post("/apply-template", {"messages": turns, "tools": TOOLS}).json()["prompt"]
    for i in range(3):
        assert f"<|call|>functions.get_weather:{i}<|with|>" in text
        assert f"of functions.get_weather:{i}<|end|>" in text
    assert "call_" not in text
