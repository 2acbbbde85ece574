"""`/v1/messages` as Anthropic's clients read it: whole, streamed, with thinking and calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from slipstream.engine.api import Chat
from slipstream.server.images.image_part import Content, joined
from tests.http.fake import INFO, delta, done
from tests.http.serving import Served, logged, until
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


def speaking_hermes(server: Served) -> Iterator[None]:
    """What a fixture does for a model with tools and thinking."""
    server.engine.info = replace(INFO, chat_template=TEMPLATE)
    yield
    server.engine.info = INFO


@pytest.fixture
def hermes(server: Served) -> Iterator[None]:
    yield from speaking_hermes(server)


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


def test_a_turn_that_only_thought_has_no_text(server: Served) -> None:
    """A reply that `max_tokens` cut in its thinking, sent back; some templates add its content to a text."""
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]}
    message(server, messages=[TALK[0], thought, TALK[0]], system=[])
    _, thinking, _ = [dict(one) for one in asked(server).messages]
    assert (thinking["reasoning_content"], thinking["content"]) == ("hm", "")


def test_blocks_of_a_turn_are_joined_once_however_many(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one they would be copied as often as there are more, while nobody else is answered."""
    n_joined = 0

    def counted(contents: Iterable[Content]) -> Content:
        nonlocal n_joined
        n_joined += 1
        return joined(contents)

    monkeypatch.setattr("slipstream.server.anthropic.content_blocks.joined", counted)
    blocks = [{"type": "text", "text": ""}, *[{"type": "text", "text": "a"}] * 200]
    message(server, messages=[{"role": "user", "content": blocks}])
    (told,) = [dict(one) for one in asked(server).messages]
    assert told["content"] == "\n".join("a" * 200)
    assert n_joined == 1


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


def test_a_request_is_counted_as_a_chat(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="slipstream")
    message(server)
    until(lambda: logged(caplog, "request"))  # a moment after the reply
    (line,) = logged(caplog, "request")
    assert (line["path"], line["n_completion"], line["status"]) == (PATH, 10, 200)
