"""Tools for models whose chat template has no place for them: a system message describes them, calls are JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI

from tests.http.fake import INFO
from tests.http.serving import Served, served
from tests.http.test_tools import CALL, HI, PING, SECOND, THOUGHT, TOOLS, WEATHER, says

# What many published templates are like: no tools, strictly alternating turns, and a system message or none.
TURNS = (
    "{% for one in messages %}"
    "{% if (one.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}"
    "<{{ one.role }}>{{ one.content | trim }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TURNS
SYSTEM = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}<end>{% set messages = messages[1:] %}"
    "{% endif %}" + TURNS
)
OWN_WAY = "{{ tools }}" + SYSTEM  # shows tools, but not how the model calls them
THINKS = "{# </think> #}" + SYSTEM
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ASKS = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
        {"id": "b", "type": "function", "function": {"name": "ping", "arguments": ""}},
    ],
}
HISTORY = [
    *HI,
    ASKS,
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": "pong"},
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as one:
        yield one


@pytest.fixture(autouse=True)
def _has_no_tools(server: Served) -> Iterator[None]:
    server.engine.info = replace(INFO, chat_template=SYSTEM)
    yield
    server.engine.info = INFO


def rendered(server: Served, template: str, **fields: Any) -> str:
    """The prompt of a request as the template writes it."""
    server.engine.info = replace(INFO, chat_template=template)
    answer = server.post("/apply-template", {"messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt"])


@pytest.mark.parametrize("template", [SYSTEM, OWN_WAY, THINKS])
def test_instructions_stand_in_the_system_message(server: Served, template: str) -> None:
    prompt = rendered(server, template, tools=TOOLS)
    system, user = prompt.split("<user>")
    assert user == "Hi there<end><assistant>"
    assert '"name": "get_weather"' in system
    assert "The weather somewhere" in system
    assert "<tool_call>" in system
    asked = [{"role": "system", "content": "Be brief."}, *HI]
    assert "<system>Be brief.\n\nYou can call" in rendered(server, template, messages=asked, tools=TOOLS)
    assert server.http.get("/props").json()["chat_format"] == "generic"


def test_without_a_system_role_the_first_turn_has_them(server: Served) -> None:
    prompt = rendered(server, NO_SYSTEM, tools=TOOLS)
    assert prompt.startswith("<user>You can call")
    assert prompt.endswith("\n\nHi there<end><assistant>")
    asked = [{"role": "system", "content": "Be brief."}, *HI]
    assert rendered(server, NO_SYSTEM, messages=asked, tools=TOOLS).startswith("<user>Be brief.\n\nYou can")
    no_user = [{"role": "assistant", "content": "Ask me."}, *HI]
    assert rendered(server, NO_SYSTEM, messages=no_user, tools=TOOLS).startswith("<user>You can call")


def test_only_what_may_be_called_is_told(server: Served) -> None:
    choice = {"type": "function", "function": {"name": "ping"}}
    prompt = rendered(server, SYSTEM, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert "get_weather" not in prompt
    assert "one call at most" in prompt
    assert "one call at most" not in rendered(server, SYSTEM, tools=TOOLS)
    assert rendered(server, SYSTEM, tools=TOOLS, tool_choice="none") == "<user>Hi there<end><assistant>"


@pytest.mark.parametrize("template", [SYSTEM, NO_SYSTEM])
def test_earlier_calls_and_results_are_text(server: Served, template: str) -> None:
    for fields in ({"tools": TOOLS}, {}):
        prompt = rendered(server, template, messages=[*HISTORY, *HI], **fields)
        assert prompt.endswith(
            "Hi there<end><assistant>I look.\n"
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call><end>'
            "<user><tool_response>\nrain\n</tool_response>\n<tool_response>\npong\n</tool_response>\nHi there<end>"
            "<assistant>"
        )
        assert ("You can call" in prompt) == bool(fields)


def test_a_conversation_goes_on_as_written(server: Served) -> None:
    begun = {"role": "assistant", "content": "Well, "}
    assert server.chat(messages=[*HI, begun], tools=TOOLS, continue_final_message=True).status_code == 200
    assert server.engine.requests[-1].prompt.messages[-1] == begun


@pytest.mark.parametrize("n_burst", [1, 7, 100])
def test_calls_are_read(client: OpenAI, server: Served, n_burst: int) -> None:
    server.engine.script = says("I look.\n" + CALL + "\n" + SECOND, n_burst)
    with client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(model="m", messages=HI, tools=TOOLS).choices[0]
    for one in (final, whole):
        assert one.finish_reason == "tool_calls"
        assert one.message.content == "I look."
        calls = [(call.function.name, call.function.arguments) for call in one.message.tool_calls]
        assert calls == [("get_weather", '{"city": "Oslo é"}'), ("ping", "{}")]
    assert server.engine.requests[-1].grammar is None, "a plain answer is left alone"


@pytest.mark.parametrize("text", ["No need.", '{"name": "ping", "arguments": {}}', "a <tool_call> b"])
def test_plain_answers_are_no_calls(client: OpenAI, server: Served, text: str) -> None:
    server.engine.script = says(text)
    reply = client.chat.completions.create(model="m", messages=HI, tools=TOOLS).choices[0]
    assert (reply.message.content, reply.message.tool_calls, reply.finish_reason) == (text, None, "stop")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "ping"]),
        ({"type": "function", "function": {"name": "ping"}}, ["ping"]),
    ],
)
def test_forced_calls_have_a_grammar(server: Served, choice: Any, names: list[str]) -> None:
    server.engine.script = says(SECOND)
    body = server.chat(tools=TOOLS, tool_choice=choice).json()
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    grammar = server.engine.requests[-1].grammar
    assert grammar is not None
    assert (grammar.kind, grammar.param, grammar.reasoning) == ("lark", "tools", None)
    assert [name for name in ("get_weather", "ping") if f'\\"{name}\\"' in grammar.source] == names


def test_structured_output_beside_tools(server: Served) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for text, wanted in (('{"a": 1}', "stop"), (SECOND, "tool_calls")):
        server.engine.script = says(text)
        body = server.chat(tools=TOOLS, response_format=asked).json()
        assert body["choices"][0]["finish_reason"] == wanted
        grammar = server.engine.requests[-1].grammar
        assert grammar is not None
        assert grammar.kind == "lark"
        assert "start: calls | answer" in grammar.source


def test_thinking_is_read_beside_calls(client: OpenAI, server: Served) -> None:
    server.engine.info = replace(INFO, chat_template=THINKS)
    server.engine.script = says(THOUGHT + CALL)
    message = client.chat.completions.create(model="m", messages=HI, tools=TOOLS).choices[0].message
    assert message.model_extra == {"reasoning_content": "Let me\nthink."}
    assert message.tool_calls[0].function.name == "get_weather"


def test_it_can_be_set(server: Served) -> None:
    """Also for a template with tools of its own, whose place for them is left empty then."""
    with served(chat_format="generic") as other:
        other.engine.info = replace(
            INFO, chat_template=OWN_WAY.replace("{{ tools }}", "{{ tools or 'none' }}")
        )
        prompt = other.post("/apply-template", {"messages": HI, "tools": [WEATHER, PING]}).json()["prompt"]
        assert prompt.startswith("none<system>You can call")
        assert other.http.get("/props").json()["chat_format"] == "generic"


def test_arguments_that_were_cut_stay_as_they_are(server: Served) -> None:
    """A client may send back a call that the reply's end cut short."""
    cut = {"id": "a", "type": "function", "function": {"name": "ping", "arguments": '{"a": "b'}}
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": [cut]}, *HI]
    assert '"arguments": {"a": "b}\n</tool_call>' in rendered(server, SYSTEM, messages=history)


DERIVED = (
    "{{ tools }}{% for one in messages %}<{{ one.role }}>{{ one.content or '' }}"
    "{% for call in one.tool_calls or [] %}"
    "[CALL]{{ call.function.name }}[WITH]{{ call.function.arguments }}"
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_format_is_read_from_the_template(client: OpenAI, server: Served) -> None:
    """One that no family has, from tools in the prompt to calls in the reply."""
    server.engine.info = replace(INFO, chat_template=DERIVED)
    assert server.http.get("/props").json()["chat_format"] == "template"
    prompt = rendered(server, DERIVED, messages=[*HISTORY, *HI], tools=TOOLS)
    assert prompt.startswith("[{'type': 'function'")
    assert 'I look.[CALL]get_weather[WITH]{"city": "Oslo"}[CALL]ping[WITH]<end><tool>rain<end>' in prompt
    server.engine.script = says('I look.[CALL]get_weather[WITH]{"city": "Oslo é"}[CALL]ping[WITH]{}')
    with client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == ("I look.", "tool_calls")
    calls = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
    assert calls == [("get_weather", '{"city": "Oslo é"}'), ("ping", "{}")]
    server.chat(tools=TOOLS, tool_choice="required")
    assert "[CALL]" in server.engine.requests[-1].grammar.source
