"""How `/v1/messages` refuses: in Anthropic's shape whoever does it, with the field's name in Anthropic's way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.engine.api import Failed, Request
from slipstream.engine.errors import Overloaded, StepFailed, TimedOut
from slipstream.server.anthropic.routes import NAMES
from slipstream.server.anthropic.wire import MessagesRequest
from tests.http.fake import Step, delta
from tests.http.serving import Served, raw, served
from tests.http.test_malformed import CANARY, INTERNALS, SIGNED, answered
from tests.http.test_messages import PATH, PING, TALK, body, speaking_hermes


@pytest.fixture
def hermes(server: Served) -> Iterator[None]:
    yield from speaking_hermes(server)


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
    (
        user({"type": "image", "source": {"data": CANARY}}),
        "messages.0.content.0.source: an image's source should",
    ),
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
        "messages.0.content.0.content: an image's source should be of the type base64 or url",
    ),
    (
        user(*[{"type": "tool_result", "tool_use_id": "a"}] * 5000),
        "messages: its blocks make 5000 turns of a",
    ),
    (assistant(*[CALLED] * 129), "messages: a turn of the assistant has 129 calls; at most 128 are allowed"),
    ({"n_probs": 2}, "n_probs: a message has no place for log-probabilities"),
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
