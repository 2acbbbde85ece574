"""`/v1/messages` as Anthropic's clients read it: whole, streamed, with thinking and calls; and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slipstream.engine.api import Chat, Failed, Request
from slipstream.engine.errors import Overloaded, StepFailed, TimedOut
from slipstream.server.anthropic.error_shape import NAMES
from slipstream.server.anthropic.wire import MessagesRequest
from tests.http.fake import INFO, Step, delta, done
from tests.http.serving import Served, logged, raw, served, until
from tests.http.test_malformed import CANARY, INTERNALS, SIGNED, answered
from tests.http.test_tools import CALL, SECOND, TEMPLATE, THOUGHT, says

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEN = "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 "
WEATHER = {
    "name": "get_weather",
    "description": "The weather somewhere",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PING = {"name": "ping", "input_schema": {"type": "object"}}
USAGE = {
    "input_tokens": 2,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 1,
    "output_tokens": 10,
}


@pytest.fixture
def hermes(server: Served) -> Iterator[None]:
    server.engine.info = replace(INFO, chat_template=TEMPLATE)
    yield
    server.engine.info = INFO


def body(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 100, "messages": [{"role": "user", "content": "Hi there"}], **fields}


def message(server: Served, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, body(**fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    told: dict[str, Any] = answer.json()
    return told


def events(server: Served, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post(PATH, body(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    blocks = [one.split("\n") for one in answer.text.split("\n\n") if one]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]
    assert all(name == one["type"] for name, one in found)
    return [one for _, one in found]


def put_together(streamed: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events build, by Anthropic's rules; they must come in their order."""
    first, *changes, delta_, stop = streamed
    assert (first["type"], delta_["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    made, texts = first["message"], []
    for one in changes:
        if one["type"] == "content_block_start":
            assert one["index"] == len(made["content"])
            made["content"].append(one["content_block"])
            texts.append("")
            is_open = True
            continue
        assert is_open
        assert one["index"] == len(made["content"]) - 1
        if one["type"] == "content_block_delta":
            kind, text = list(one["delta"].values())
            texts[-1] += text
            assert kind == KIND_OF[made["content"][-1]["type"]] or kind == "signature_delta"
        else:
            is_open = one["type"] != "content_block_stop"
    for block, text in zip(made["content"], texts, strict=True):
        name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[name] = json.loads(text or "{}") if name == "input" else text
    more = {name: one for name, one in delta_.items() if name not in ("type", "delta")}
    return made | delta_["delta"] | more


KIND_OF = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def alike(one: dict[str, Any]) -> dict[str, Any]:
    """A message without what is drawn anew for each."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in one["content"]]
    return {**one, "id": "", "content": blocks}


def asked(server: Served) -> Chat:
    """The last conversation that reached the engine."""
    prompt = server.engine.requests[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


# --- replies ---


def test_whole(server: Served) -> None:
    told = message(server, system="Be short.", seed=3)
    assert told["id"].startswith("msg_")
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", "fake/model")
    assert told["content"] == [{"type": "text", "text": TEN}]
    assert (told["stop_reason"], told["stop_sequence"], told["seed"]) == ("end_turn", None, 3)
    assert told["usage"] == USAGE | {"input_tokens": 4}
    assert [dict(one) for one in asked(server).messages] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi there"},
    ]


def test_a_stream_builds_the_whole(server: Served) -> None:
    streamed = events(server, seed=3)
    assert [one["type"] for one in streamed] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    begun = streamed[0]["message"]
    assert (begun["content"], begun["stop_reason"]) == ([], None)
    assert begun["usage"]["input_tokens"] == 3
    assert alike(put_together(streamed)) == alike(message(server, seed=3))


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize("n_burst", [1, 7, 100])
def test_thinking_text_and_calls_are_blocks_in_order(server: Served, n_burst: int) -> None:
    server.engine.script = says(THOUGHT + "I look.\n" + CALL + "\n" + SECOND, n_burst)
    fields: dict[str, Any] = {"tools": [WEATHER, PING], "seed": 1}
    whole = message(server, **fields)
    thought, said, look, ping = whole["content"]
    assert thought == {"type": "thinking", "thinking": "Let me\nthink.", "signature": ""}
    assert said == {"type": "text", "text": "I look."}
    assert (look["type"], look["name"], look["input"]) == ("tool_use", "get_weather", {"city": "Oslo é"})
    assert (ping["name"], ping["input"]) == ("ping", {})
    assert look["id"] != ping["id"]
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    streamed = events(server, **fields)
    assert alike(put_together(streamed)) == alike(whole)
    kinds = [one["delta"]["type"] for one in streamed if one["type"] == "content_block_delta"]
    assert kinds.count("signature_delta") == 1


@pytest.mark.usefixtures("hermes")
def test_thinking_is_left_out_where_it_is_not_wanted(server: Served) -> None:
    server.engine.script = says(THOUGHT + "Yes.")
    thinking = {"type": "adaptive", "display": "omitted"}
    whole = message(server, thinking=thinking, seed=1)
    assert whole["content"] == [{"type": "text", "text": "Yes."}]
    assert alike(put_together(events(server, thinking=thinking, seed=1))) == alike(whole)


@pytest.mark.usefixtures("hermes")
def test_a_call_that_was_cut_has_what_there_is_of_it(server: Served) -> None:
    server.engine.script = says(CALL[: CALL.index("slo")], reason="length")
    whole = message(server, tools=[WEATHER])
    assert whole["content"][0]["input"] == {"city": "O"}
    assert whole["stop_reason"] == "max_tokens"
    server.engine.script = says(CALL[: CALL.index("Oslo") - 2], reason="length")
    assert message(server, tools=[WEATHER])["content"][0]["input"] == {}


def test_why_it_stopped(server: Served) -> None:
    assert message(server, max_tokens=4)["stop_reason"] == "max_tokens"
    server.engine.script = lambda request: [delta("a"), done(request, 1, stop_string="END")]
    for fields in ({"stop_sequences": ["END", "x"]}, {"stop": "END"}):
        told = message(server, **fields)
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "END")
    assert server.engine.requests[0].max_tokens == 4
    assert server.engine.requests[1].stop == ("END", "x")
    ended = events(server)[-2]["delta"]
    assert ended == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_a_reply_without_text_has_no_blocks(server: Served) -> None:
    server.engine.script = lambda request: [done(request, 1)]
    assert message(server)["content"] == []
    assert put_together(events(server))["content"] == []


# --- requests ---


def test_what_is_asked_reaches_the_engine(server: Served) -> None:
    message(
        server,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        speculative={"types": "none"},
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        metadata={"user_id": "u"},
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "short.", "cache_control": None}],
    )
    request = server.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (request.speculate.types, request.max_tokens) == ((), 100)
    assert request.grammar is not None
    assert request.grammar.kind == "json_schema"
    assert asked(server).template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert asked(server).messages[0]["content"] == "Be\nshort."
    message(server, thinking={"type": "disabled"})
    assert asked(server).template_kwargs == {"enable_thinking": False}
    message(server, thinking={"type": "disabled"}, chat_template_kwargs={"enable_thinking": True})
    assert asked(server).template_kwargs == {"enable_thinking": True}
    message(server, thinking={"type": "between_tools"})
    assert asked(server).template_kwargs == {}


TALK = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_abc", "name": "get_weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "other", "name": "ping", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_abc",
                "content": [{"type": "text", "text": "rain"}],
            },
            {"type": "tool_result", "tool_use_id": "other", "is_error": True},
            {"type": "text", "text": "And?"},
            {"type": "text", "text": "Now?"},
        ],
    },
    {"role": "user", "content": "Say."},
]


@pytest.mark.usefixtures("hermes")
def test_turns_are_the_messages_of_a_chat(server: Served) -> None:
    message(server, messages=TALK, tools=[WEATHER, PING])
    user, calling, rain, pong, last = [dict(one) for one in asked(server).messages]
    assert user == {"role": "user", "content": "Weather?"}
    assert (calling["role"], calling["reasoning_content"], calling["content"]) == (
        "assistant",
        "hm",
        "I look.",
    )
    assert [one["id"] for one in calling["tool_calls"]] == ["abc", "other"]
    assert json.loads(calling["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert rain == {"role": "tool", "content": "rain", "tool_call_id": "abc"}
    assert pong == {"role": "tool", "content": "", "tool_call_id": "other"}
    assert last == {"role": "user", "content": "And?\nNow?\nSay."}
    assert asked(server).add_generation_prompt


def test_a_last_turn_of_the_assistant_is_continued(server: Served) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I"}]
    message(server, messages=begun)
    assert asked(server).continue_final_message
    assert not asked(server).add_generation_prompt
    message(server, messages=[begun[0], {"role": "assistant", "content": []}])
    assert not asked(server).continue_final_message


@pytest.mark.usefixtures("hermes")
def test_tools_and_choices(server: Served) -> None:
    def shown(**fields: Any) -> tuple[list[str], bool]:
        message(server, tools=[WEATHER, PING], **fields)
        tools = asked(server).template_kwargs.get("tools", ())
        return [one["function"]["name"] for one in tools], server.engine.requests[-1].grammar is not None

    both = ["get_weather", "ping"]
    assert shown() == (both, False)
    assert shown(tool_choice={"type": "auto"}) == (both, False)
    assert shown(tool_choice={"type": "any"}) == (both, True)
    assert shown(tool_choice={"type": "tool", "name": "ping"}) == (["ping"], True)
    assert shown(tool_choice={"type": "none"}) == ([], False)
    function = WEATHER | {"type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}
    message(server, tools=[function])
    (tool,) = asked(server).template_kwargs["tools"]
    assert tool["function"]["parameters"] == WEATHER["input_schema"]
    server.engine.script = says(CALL + SECOND)
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(message(server, tools=[WEATHER, PING], tool_choice=alone)["content"]) == 1
    assert len(message(server, tools=[WEATHER, PING])["content"]) == 2


def test_counting_needs_no_limit(server: Served) -> None:
    answer = server.post(COUNT, {"messages": TALK[:1], "system": "Be short."})
    assert answer.json() == {"input_tokens": 4}
    assert not server.engine.requests


# --- errors ---


def refusal(answer: Any, status: int) -> tuple[str, str]:
    """Type and message of an error, which must have Anthropic's shape and nothing more."""
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert list(told) == ["type", "error", "request_id"]
    assert (told["type"], list(told["error"])) == ("error", ["type", "message"])
    assert told["request_id"] == answer.headers["request-id"]
    assert int(answer.headers["content-length"]) == len(answer.content)
    return told["error"]["type"], told["error"]["message"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, {"role": "user", "content": "a"}]}


CALLED = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
DEEP: Any = {}
for _ in range(300):
    DEEP = {"a": DEEP}
WRONG = [
    ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 0}, "max_tokens: Input should be greater"),
    ({"max_tokens": -1}, "max_tokens: Input should be greater"),
    ({"messages": None}, "messages: "),
    ({"messages": []}, "messages: List should have at least 1"),
    ({"messages": [7]}, "messages.0: "),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: Input should be 'user'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content: this field is required"),
    (
        {"messages": [{"role": "user", "content": 7}]},
        "messages.0.content: Input should be a string or a list",
    ),
    (user(CANARY), "messages.0.content.0: Input should be an object with a type"),
    (user({"type": "text"}), "messages.0.content.0.text: this field is required"),
    (user({"type": "text", "text": 7}), "messages.0.content.0.text: Input should be a valid string"),
    (user({"type": "image", "source": {"data": CANARY}}), "messages.0.content.0: only blocks of the types"),
    (user({"type": "document"}), "messages.0.content.0: only blocks of the types"),
    (user(CALLED), "messages.0.content: a turn of the user has no blocks of the type tool_use"),
    (assistant({"type": "tool_result", "tool_use_id": "a"}), "messages.0.content: a turn of the assistant"),
    (assistant(CALLED | {"input": "{}"}), "messages.0.content.0.input: Input should be an object"),
    (assistant(CALLED | {"input": DEEP}), "messages.0.content.0.input: Input is nested too deeply"),
    (assistant(CALLED | {"name": "a b"}), "messages.0.content.0.name: "),
    ({"messages": [TALK[0], {"role": "assistant", "content": [CALLED]}]}, "messages.1: results of its calls"),
    (
        user({"type": "tool_result", "content": "a"}),
        "messages.0.content.0.tool_use_id: this field is required",
    ),
    (
        user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
        "messages.0.content.0.content: only parts of type 'text' are supported",
    ),
    ({"system": 7}, "system: Input should be a string"),
    ({"system": [{"type": "image"}]}, "system: only parts of type 'text'"),
    ({"stop_sequences": [""]}, "stop_sequences: Each string should have 1 to"),
    ({"stop_sequences": [7]}, "stop_sequences: Input should be a string or a list"),
    ({"temperature": "hot"}, "temperature: "),
    ({"top_k": -2}, "top_k: "),
    ({"thinking": {"type": "maybe"}}, "thinking.type: "),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens: "),
    ({"tools": "ping"}, "tools: Input should be a list"),
    ({"tools": [{"name": "ping"}]}, "tools: Each tool should have a JSON schema as 'input_schema'"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools: only tools with an input_schema",
    ),
    ({"tools": [PING, PING]}, "tools: Each function should have a name of its own"),
    ({"tools": [PING]}, "tools: this model's chat template has no place for tools"),
    (
        {"tool_choice": "any"},
        "tool_choice: Input should be an object with one of the types auto, any, none, tool",
    ),
    ({"tool_choice": {"type": "tool"}}, "tool_choice: a choice of the type 'tool' should have"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: only allowed with tools"),
    ({"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "tool_choice: 'disable_parallel"),
    (
        {"output_config": {"format": {"type": "text"}}},
        "output_config.format: Input should be an object of the",
    ),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: "),
    ({"output_config": {"effort": 3}}, "output_config.effort: "),
    ({"mcp_servers": [{"url": CANARY}]}, "mcp_servers: this is not supported"),
    ({"n": 2}, "n: a reply is one message here"),
    ({"logit_bias": {"1000": 1}}, "logit_bias: a token id is outside the vocabulary"),
    ({"messages": [{"role": "user", "content": "a " * 600}]}, "This model's maximum context length"),
]


@pytest.mark.parametrize(("fields", "told"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(server: Served, fields: dict[str, Any], told: str) -> None:
    answer = server.post(PATH, body(**fields))
    kind, text = refusal(answer, 400)
    assert kind == "invalid_request_error"
    assert text.startswith(told), text
    assert CANARY not in answer.text
    assert not INTERNALS.search(answer.content)
    assert not server.engine.running
    assert refusal(server.post(PATH, body(stream=True, **fields)), 400) == (kind, text)


def test_a_field_of_another_server_is_named_as_it_was_sent(server: Served) -> None:
    assert refusal(server.post(PATH, {"max_tokens": 1}), 400)[1] == "messages: this field is required"
    assert refusal(server.post(PATH, {"messages": TALK[:1]}), 400)[1] == "max_tokens: this field is required"
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    twice = body(output_config={"format": schema}, grammar='start: "a"')
    assert "cannot be combined with" in refusal(server.post(PATH, twice), 400)[1]


@pytest.mark.parametrize("name", sorted(MessagesRequest.model_fields.keys() - SIGNED))
@pytest.mark.parametrize("value", [-5, 1e308], ids=["-5", "1e308"])
def test_no_field_takes_a_number_out_of_range(server: Served, name: str, value: float) -> None:
    told = refusal(server.post(PATH, body(**{name: value})), 400)[1]
    assert told.startswith(f"{NAMES.get(name, name)}: ")
    assert not server.engine.requests


@pytest.mark.usefixtures("hermes")
def test_a_field_of_a_chat_has_its_name_here(server: Served) -> None:
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    forced = body(output_config={"format": schema}, tools=[PING], tool_choice={"type": "any"})
    told = refusal(server.post(PATH, forced), 400)[1]
    assert told.startswith("output_config.format: cannot be combined with a tool_choice")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a":1,"a":2}', b"\xff", b"[" * 10**5])
def test_bodies_that_are_none(server: Served, content: bytes) -> None:
    status, told = answered(server, PATH, content)
    assert status == 400
    assert json.loads(told)["error"]["type"] == "invalid_request_error"


def test_everything_below_the_path_refuses_in_the_same_shape() -> None:
    with served(api_key="secret", api_prefix="/llm", max_body=1) as one:
        key = {"x-api-key": "secret"}
        one.http.headers.update(key)
        path = f"/llm{PATH}"

        def post(**more: Any) -> Any:
            return one.http.post(path, **({"json": body()} | more))

        assert post().status_code == 200
        assert refusal(post(headers={"x-api-key": "wrong"}), 401)[0] == "authentication_error"
        assert refusal(post(headers={"host": "evil.example"}), 403)[0] == "permission_error"
        assert refusal(post(json=body(system="x" * (1 << 20))), 413)[0] == "request_too_large"
        assert refusal(one.http.post(path, content=b"{}"), 415)[0] == "invalid_request_error"
        assert refusal(one.http.get(path), 405)[0] == "invalid_request_error"
        assert refusal(one.http.post(f"{path}/batches", json={}), 404)[0] == "not_found_error"
        assert refusal(one.http.post(f"{path}/other", json={}), 404)[0] == "not_found_error"
        assert one.http.post("/llm/v1/messages-of", json={}).json()["error"]["code"] == "not_found"
        assert one.http.post(PATH, json={}).json()["error"]["code"] == "not_found", "without the prefix"
        two = b"transfer-encoding: chunked\r\ncontent-length: 5"
        head = b"POST /llm/v1/messages HTTP/1.1\r\nhost: localhost\r\nx-api-key: secret\r\n" + two
        assert b'{"type":"error","error":{"type":"invalid_request_error"' in raw(one.port, head + b"\r\n\r\n")
    with served(loaded=False) as one:
        answer = one.http.post(PATH, json=body())
        assert refusal(answer, 503)[0] == "overloaded_error"
        assert answer.headers["retry-after"] == "5"


def test_failures_of_the_engine(server: Served) -> None:
    for error, status, kind in (
        (Overloaded("many wait", 1.5), 429, "rate_limit_error"),
        (TimedOut(2.5), 504, "timeout_error"),
        (ZeroDivisionError(CANARY), 500, "api_error"),
    ):
        server.engine.refusal = error
        answer = server.http.post(PATH, json=body())
        assert refusal(answer, status)[0] == kind
        assert CANARY not in answer.text
    assert answer.headers["x-should-retry"] == "false"


def test_a_failure_in_a_stream_is_its_last_event(server: Served) -> None:
    def failing(request: Request) -> Iterator[Step]:
        yield delta("a")
        yield Failed(StepFailed(CANARY))

    server.engine.script = failing
    answer = server.post(PATH, body(stream=True), headers={"x-request-id": "mine"})
    *_, last = answer.text.strip().split("\n\n")
    assert last.startswith("event: error\ndata: ")
    told = json.loads(last.partition("data: ")[2])
    assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", "api_error", "mine")
    assert CANARY not in answer.text
    assert refusal(server.post(PATH, body()), 500)[0] == "api_error"


def test_strict_servers_refuse_what_they_do_not_know() -> None:
    with served(strict_api=True) as one:
        known = {"metadata": {}, "context_management": {"edits": []}, "service_tier": "auto"}
        assert one.post(PATH, body(**known)).status_code == 200
        assert refusal(one.post(PATH, body(unheard_of=1)), 400)[1] == "unknown field: unheard_of"


def test_a_request_is_counted_as_a_chat(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="slipstream")
    message(server)
    until(lambda: logged(caplog, "request"))  # a moment after the reply
    (line,) = logged(caplog, "request")
    assert (line["path"], line["n_completion"], line["status"]) == (PATH, 10, 200)
