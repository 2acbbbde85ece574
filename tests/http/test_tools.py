"""Tools and reasoning as OpenAI's own client sees them, whole and streamed, from an engine that speaks in bursts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI

from slipstream.engine.api import Chat, Delta, Request
from tests.http.fake import INFO, Step, delta, done, told
from tests.http.serving import Served, served

HI = [{"role": "user", "content": "Hi there"}]
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}"
    '<think></think> <tool_call>{"name": …, "arguments": …}</tool_call>'
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]
THOUGHT = "<think>\nLet me\nthink.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo é"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as one:
        yield one


@pytest.fixture(autouse=True)
def _speaks_hermes(server: Served) -> Iterator[None]:
    server.engine.info = replace(INFO, chat_template=TEMPLATE)
    yield
    server.engine.info = INFO


def says(text: str, n_burst: int = 7, reason: str = "stop") -> Callable[[Request], Iterator[Step]]:
    """A script that says the text in bursts of some tokens, three characters each."""

    def script(request: Request) -> Iterator[Step]:
        tokens = [text[i : i + 3] for i in range(0, len(text), 3)]
        for i in range(0, len(tokens), n_burst):
            burst = tuple(tokens[i : i + n_burst])
            yield Delta("".join(burst), tuple(range(len(burst))), (None,) * len(burst), burst)
        yield done(request, len(tokens), reason)

    return script


@pytest.mark.parametrize("n_burst", [1, 2, 7, 100])
def test_the_helper_puts_a_stream_together(client: OpenAI, server: Served, n_burst: int) -> None:
    server.engine.script = says(THOUGHT + "I look.\n" + CALL + "\n" + SECOND, n_burst)
    with client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.role == "assistant"
    assert final.message.content == "I look."
    assert final.message.model_extra == {"reasoning_content": "Let me\nthink."}
    first, second = final.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("get_weather", '{"city": "Oslo é"}')
    assert first.function.parsed_arguments == {"city": "Oslo é"}
    assert (second.function.name, second.function.arguments) == ("ping", "{}")
    assert first.type == second.type == "function"
    assert len({first.id, second.id}) == 2
    kinds = [event.type for event in events]
    assert kinds.count("tool_calls.function.arguments.done") == 2


def test_a_whole_reply(client: OpenAI, server: Served) -> None:
    server.engine.script = says(THOUGHT + CALL)
    reply = client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.model_extra == {"reasoning_content": "Let me\nthink."}
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo é"}
    # The markers' own tokens may count or not; what was thought does, the rest does not.
    least, most = len("Let me\nthink.") // 3, -(-len(THOUGHT) // 3)
    assert least <= reply.usage.completion_tokens_details.reasoning_tokens <= most


def test_3_4_fragments_are_what_clients_add_up(server: Served) -> None:
    server.engine.script = says(CALL + SECOND, 2)
    deltas = [one["choices"][0]["delta"] for one in server.events(tools=TOOLS)]
    pieces = [entry for one in deltas for entry in one.get("tool_calls", ())]
    assert [one["index"] for one in pieces] == sorted(one["index"] for one in pieces)
    for index in (0, 1):
        first, *later = [one for one in pieces if one["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert set(first["function"]) == {"name", "arguments"}
        assert all(set(one) == {"index", "function"} for one in later)
        assert all(set(one["function"]) == {"arguments"} for one in later)
    assert len([one for one in pieces if one["index"] == 0]) > 3  # told while it is written
    assert deltas[-1] == {}


def test_arguments_are_told_before_the_call_ends(server: Served) -> None:
    half = CALL.index("Oslo") + 3
    server.engine.script = lambda request: [
        delta(CALL[:half]),
        0.3,
        delta(CALL[half:]),
        done(request, 2),
    ]
    first = server.events(tools=TOOLS)[1]["choices"][0]["delta"]["tool_calls"][0]["function"]
    assert first == {"name": "get_weather", "arguments": '{"city": "Osl'}


def test_a_reply_that_is_cut_is_no_tool_call(client: OpenAI, server: Served) -> None:
    server.engine.script = says(CALL[:-20], reason="length")
    reply = client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.tool_calls[0].function.name == "get_weather"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nget_weather, please\n</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": "Oslo"}</tool_call>',
        '<tool_call>{"nome": "get_weather"}</tool_call> and more',
        "<tool_call>",
        '<tool_call>{"name": "get_weather"',
        "</tool_call> a < b",
    ],
)
def test_malformed_calls_are_content(client: OpenAI, server: Served, text: str) -> None:
    server.engine.script = says(text, 2)
    reply = client.chat.completions.create(model="m", messages=HI, tools=TOOLS).choices[0]
    assert (reply.message.content, reply.message.tool_calls, reply.finish_reason) == (text, None, "stop")
    with client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
        assert stream.get_final_completion().choices[0].message.content == text


def test_one_call_at_most(client: OpenAI, server: Served) -> None:
    """The engine is stopped, and the figures are those of what it did."""
    server.engine.script = says(CALL + "\n" + SECOND * 50, 4)
    reply = client.chat.completions.create(model="m", messages=HI, tools=TOOLS, parallel_tool_calls=False)
    assert [one.function.name for one in reply.choices[0].message.tool_calls] == ["get_weather"]
    assert reply.choices[0].message.content is None
    assert reply.choices[0].finish_reason == "tool_calls"
    assert server.engine.streams[-1].asked_to_finish
    n_tokens = -(-len(CALL) // 3)
    assert n_tokens <= reply.usage.completion_tokens <= n_tokens + len(SECOND) // 3 + 8  # two steps
    assert reply.usage.prompt_tokens_details.cached_tokens == 1
    figures = reply.model_extra["metrics"]["speculative_decoding"]
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
    assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1
    with client.chat.completions.stream(
        model="m", messages=HI, tools=TOOLS, parallel_tool_calls=False, n=2
    ) as stream:
        final = stream.get_final_completion()
    assert [len(one.message.tool_calls) for one in final.choices] == [1, 1]
    assert not server.engine.running


def test_tokens_behind_the_last_call_are_not_sent(server: Served) -> None:
    """However many come in a step: with drafts there are more than without."""
    found = []
    for n_burst in (1, 4, 7, 16, 100):
        server.engine.script = says(CALL + "\n" + SECOND * 3, n_burst)
        body = server.chat(tools=TOOLS, parallel_tool_calls=False, return_token_ids=True).json()
        found.append(len(body["choices"][0]["token_ids"]))
    assert len(set(found)) == 1
    assert found[0] < len(CALL + "\n" + SECOND * 2) // 3


@pytest.mark.parametrize("n_burst", [1, 7, 100])
@pytest.mark.parametrize(("reason", "stop_string"), [("stop", None), ("length", None), ("stop", "</tool")])
def test_what_the_generation_meets_behind_the_last_call_is_not_told(
    server: Served, n_burst: int, reason: str, stop_string: str | None
) -> None:
    """Whether it comes so far depends on how many tokens come in a step."""

    def script(request: Request) -> Iterator[Step]:
        *steps, _ = says(CALL + "\n" + SECOND * 3, n_burst)(request)
        yield from steps
        yield done(request, 80, reason, stop_string=stop_string)

    server.engine.script = script
    body = server.chat(tools=TOOLS, parallel_tool_calls=False).json()
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    tools = [{"name": "get_weather", "input_schema": {"type": "object"}}]
    asked = {"messages": HI, "max_tokens": 99, "tools": tools, "tool_choice": choice}
    message = server.post("/v1/messages", asked).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


def test_one_call_and_the_end_is_not_cut(server: Served) -> None:
    server.engine.script = says(CALL)
    body = server.chat(tools=TOOLS, parallel_tool_calls=False).json()
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert not server.engine.streams[-1].asked_to_finish
    assert body["usage"]["completion_tokens"] == -(-len(CALL) // 3)


def prompt_of(server: Served, **fields: Any) -> Chat:
    answer = server.chat(**fields)
    assert answer.status_code == 200, answer.text
    prompt = server.engine.requests[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


def names_of(server: Served, **fields: Any) -> list[str]:
    shown = prompt_of(server, **fields).template_kwargs.get("tools", [])
    return [one["function"]["name"] for one in shown]


def test_tools_reach_the_template(server: Served) -> None:
    shown = prompt_of(server, tools=TOOLS).template_kwargs["tools"]
    function = {name: value for name, value in WEATHER["function"].items() if name != "strict"}
    assert shown[0] == {"type": "function", "function": function}
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    assert shown[1]["function"]["parameters"] == none
    assert names_of(server, tools=TOOLS, tool_choice=None) == ["get_weather", "ping"]
    assert names_of(server, tools=TOOLS, tool_choice="none") == []
    only = {"type": "function", "function": {"name": "ping"}}
    allowed = {"mode": "auto", "tools": [only]}
    assert names_of(server, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}) == [
        "ping"
    ]
    assert server.engine.requests[-1].grammar is None
    server.post("/apply-template", {"messages": HI, "tools": TOOLS})


def test_without_tools_calls_are_text(client: OpenAI, server: Served) -> None:
    server.engine.script = says(CALL)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        reply = client.chat.completions.create(model="m", messages=HI, **fields).choices[0]
        assert (reply.message.content, reply.finish_reason) == (CALL, "stop")


@pytest.mark.parametrize(
    ("choice", "names", "many"),
    [
        ("required", ["get_weather", "ping"], True),
        ({"type": "function", "function": {"name": "ping"}}, ["ping"], True),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PING]}},
            ["ping"],
            False,
        ),
    ],
)
def test_forced_calls_have_a_grammar(server: Served, choice: Any, names: list[str], many: bool) -> None:
    server.engine.script = says(SECOND)
    body = server.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=many).json()
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    grammar = server.engine.requests[-1].grammar
    assert grammar is not None
    assert (grammar.kind, grammar.param) == ("lark", "tools")
    assert grammar.reasoning == ("<think>", "</think>")
    assert [name for name in ("get_weather", "ping") if f'\\"{name}\\"' in grammar.source] == names
    assert (")*" in grammar.source) == many


@pytest.mark.parametrize(("choice", "content"), [("required", None), ("auto", "")])
def test_a_stream_of_forced_calls_begins_without_content(
    server: Served, choice: str, content: str | None
) -> None:
    """As OpenAI's does: null, where no text will come to be joined to it."""
    server.engine.script = says(SECOND)
    first, *_ = server.events(tools=TOOLS, tool_choice=choice)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": content}


def test_a_conversation_with_calls(server: Served) -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "ping", "arguments": "{}"}, "index": 0}
    prompt = prompt_of(
        server,
        messages=[
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "pong"}]},
            {"role": "assistant", "tool_calls": [call], "reasoning": "so"},
            {"role": "function", "name": "ping", "content": "pong"},
        ],
        tools=TOOLS,
    )
    told = {"id": "abc", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    assert prompt.messages[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [told], "reasoning_content": "hm"},
        {"role": "tool", "content": "pong", "tool_call_id": "abc"},
        {"role": "assistant", "content": None, "tool_calls": [told], "reasoning_content": "so"},
        {"role": "tool", "content": "pong", "name": "ping"},
    ]


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning", "reasoning_content"}),
        ("none", set()),
    ],
)
def test_reasoning_field(field: str, names: set[str]) -> None:
    with served(reasoning_field=field) as server:
        server.engine.info = replace(INFO, chat_template=TEMPLATE)
        server.engine.script = says(THOUGHT + "Yes.", 3)
        message = server.chat().json()["choices"][0]["message"]
        assert set(message) == {"role", "content"} | names
        assert {message[name] for name in names} <= {"Let me\nthink."}
        assert message["content"] == ("Yes." if names else THOUGHT + "Yes.")
        deltas = [one["choices"][0]["delta"] for one in server.events(tools=TOOLS)]
        for name in ("content", *names):
            assert "".join(one.get(name) or "" for one in deltas) == message[name]


SPLIT, WHOLE = {"reasoning_content": "Let me\nthink.", "content": "Yes."}, {"content": THOUGHT + "Yes."}


@pytest.mark.parametrize(
    ("field", "asked", "wanted"),
    [
        ("reasoning_content", {"reasoning_format": "none"}, WHOLE),
        ("reasoning_content", {"reasoning_format": "auto"}, SPLIT),
        ("none", {"reasoning_format": "auto"}, WHOLE),
        ("none", {"reasoning_format": "deepseek"}, SPLIT),
        ("reasoning_content", {"separate_reasoning": False}, WHOLE),
        ("none", {"separate_reasoning": True}, SPLIT),
        ("reasoning_content", {"include_reasoning": False}, {"content": "Yes."}),
        ("none", {"include_reasoning": False}, {"content": "Yes."}),
        ("none", {"include_reasoning": True}, WHOLE),
    ],
)
def test_a_request_says_where_thinking_goes(
    field: str, asked: dict[str, Any], wanted: dict[str, str]
) -> None:
    with served(reasoning_field=field) as server:
        server.engine.info = replace(INFO, chat_template=TEMPLATE)
        server.engine.script = says(THOUGHT + "Yes.", 3)
        message = server.chat(**asked).json()["choices"][0]["message"]
        assert message == {"role": "assistant", **wanted}
        deltas = [one["choices"][0]["delta"] for one in server.events(**asked)]
        for name in ("content", "reasoning_content"):
            assert "".join(one.get(name) or "" for one in deltas) == wanted.get(name, "")


def test_the_prompt_tells_whether_thinking_has_begun(server: Served) -> None:
    server.engine.script = says("So.</think>Yes.", 2)
    for tail, wanted in (
        ("<assistant><think>\n", ("So.", "Yes.")),
        ("<think></think>", (None, "So.</think>Yes.")),
        ("<assistant>", (None, "So.</think>Yes.")),
        ("<user>What is <think> for?<assistant>", (None, "So.</think>Yes.")),
    ):
        server.engine.prompt_tail = tail
        message = server.chat().json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == wanted
    server.engine.prompt_tail = "<assistant>"


def test_a_call_ends_thinking_unless_a_grammar_holds_behind_it(server: Served) -> None:
    server.engine.script = says(f"<think>\nSo:\n{SECOND}\n</think>\n\n{CALL}")
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    for fields, names in (
        ({}, ["ping", "get_weather"]),
        ({"tool_choice": "required"}, ["get_weather"]),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, ["get_weather"]),
        ({"response_format": schema}, ["get_weather"]),
    ):
        message = server.chat(tools=TOOLS, **fields).json()["choices"][0]["message"]
        assert [one["function"]["name"] for one in message["tool_calls"]] == names
        assert message["reasoning_content"] == (f"So:\n{SECOND}" if fields else "So:")


def test_a_reply_that_goes_on_may_be_thinking(server: Served) -> None:
    server.engine.script = says("So.</think>Yes.", 2)
    for begun, wanted in (
        ("<think>I must", ("So.", "Yes.")),
        ("<think>Well.</think>I", (None, "So.</think>Yes.")),
        ("I", (None, "So.</think>Yes.")),
    ):
        messages = [*HI, {"role": "assistant", "content": begun}]
        message = server.chat(messages=messages, continue_final_message=True).json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == wanted


def test_a_call_that_a_stop_string_cuts_is_none(server: Served) -> None:
    server.engine.script = says(CALL[:-20])
    choice = server.chat(tools=TOOLS, stop=["x"]).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_control_tokens_are_seen_only_where_needed(server: Served) -> None:
    controls = {"<tool_call>": True, "</tool_call>": True, "<|x|>": True, "<think>": False, "</think>": False}
    server.engine.info = replace(INFO, chat_template=TEMPLATE, added_tokens=controls)
    text = (CALL[:11], "<|x|>", CALL[11:-12], "</tool_call>")
    tokens = tuple(told(i, one, 0) for i, one in enumerate(text))
    server.engine.script = lambda request: [
        Delta("".join(text), (1, 2, 3, 4), (None,) * 4, text, tokens),
        done(request, 4),
    ]
    choice = server.chat(tools=TOOLS, logprobs=True).json()["choices"][0]
    message = choice["message"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [text[0], *text[2:]], "the same text as without tools"
    assert not server.engine.requests[-1].skip_special
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo é"}'
    server.engine.info = replace(server.engine.info, added_tokens={"<|x|>": True})
    server.chat(tools=TOOLS)
    assert server.engine.requests[-1].skip_special


def test_log_probabilities_stand_beside_calls(server: Served) -> None:
    """Every token of the text has its place, also of text that is held back or is a marker."""
    server.engine.script = lambda request: [
        Delta(CALL[:30], (1, 2), (None, None), (CALL[:15], CALL[15:30]), (told(1, "a", 0), told(2, "b", 0))),
        Delta(CALL[30:], (3,), (None,), (CALL[30:],), (told(3, "c", 0),)),
        done(request, 3),
    ]
    chunks = server.events(tools=TOOLS, logprobs=True, spec_detail=True)
    entries = [one["choices"][0]["logprobs"] for one in chunks if one["choices"]]
    assert [len(one["content"]) for one in entries if one] == [2, 1]


FUNCTION = {"type": "function", "function": {"name": "f"}}
NESTED: dict[str, Any] = {}
for _ in range(70):
    NESTED = {"properties": NESTED}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": {}}, "tools", "invalid_value"),
        ({"tools": [1]}, "tools", "invalid_value"),
        ({"tools": [{}]}, "tools", "invalid_value"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "unsupported_value"),
        ({"tools": [{"type": "function"}]}, "tools", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools", "invalid_value"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools", "invalid_value"),
        (
            {"tools": [{**FUNCTION, "function": {"name": f"f{i}"}} for i in range(129)]},
            "tools",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": NESTED}}]},
            "tools",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "x" * 70000}}}]},
            "tools",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools",
            "invalid_value",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": FUNCTION}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": FUNCTION}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "invalid_value"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {}}},
            "tool_choice",
            "unsupported_value",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "invalid_value"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_value"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_value"),
        ({"function_call": {"name": "f"}}, "function_call", "unsupported_value"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "invalid_value",
        ),
        ({"tools": TOOLS, "guided_regex": "a+"}, "guided_regex", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": None, "tool_calls": []}]},
            "messages[0].content",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [FUNCTION]}]},
            "messages[0].tool_calls",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "messages[0]",
            "unsupported_value",
        ),
    ],
)
def test_what_is_refused(server: Served, fields: dict[str, Any], param: str, code: str) -> None:
    error = server.error(400, **fields)
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"].startswith(param)
    assert len(error["message"]) < 300
    assert not server.engine.requests


def test_tools_are_refused_where_the_format_that_is_set_cannot_have_them(server: Served) -> None:
    for format_, why in (("none", "cannot be read"), ("hermes", "no place for tools")):
        with served(chat_format=format_) as other:
            error = other.error(400, tools=TOOLS)
            assert (error["param"], error["code"]) == ("tools", "unsupported_value")
            assert "--chat-format" in error["message"]
            assert why in error["message"]
            assert other.chat(tools=TOOLS, tool_choice="none").status_code == 200
    answer = server.post("/v1/completions", {"prompt": "a", "tools": TOOLS})
    assert answer.json()["error"]["param"] == "tools"


def test_the_format_is_told_and_can_be_set(server: Served) -> None:
    assert server.http.get("/props").json()["chat_format"] == "hermes"
    with served(chat_format="llama3") as other:
        other.engine.info = replace(INFO, chat_template=TEMPLATE)
        assert other.http.get("/props").json()["chat_format"] == "llama3"
        other.engine.script = says('{"name": "ping", "parameters": {}}')
        message = other.chat(tools=TOOLS).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "ping"
        other.engine.script = says('{"name": "pong", "parameters": {}}')
        message = other.chat(tools=TOOLS).json()["choices"][0]["message"]
        assert message["content"] == '{"name": "pong", "parameters": {}}'
