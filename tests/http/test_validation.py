"""What is refused, and how: always 400 with the field's name, never the input, before the engine hears of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.serving import Served, chat, raw, served

TEXT = "invalid_value"
UNSUPPORTED = "unsupported_value"


def bad(
    server: Served, path: str, content: bytes, kind: str = "application/json"
) -> tuple[int, dict[str, Any]]:
    answer = server.http.post(path, content=content, headers={"content-type": kind})
    assert not server.engine.requests
    return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'"x"', id="string"),
        pytest.param(b"null", id="null"),
        pytest.param(b"\xff\xfe{}", id="not utf-8"),
        pytest.param(b'{"prompt": "\xed\xa0\x80"}', id="encoded surrogate"),
        pytest.param(b'{"prompt": "\\ud800"}', id="lone surrogate"),
        pytest.param(b'{"prompt": "x", "temperature": NaN}', id="NaN"),
        pytest.param(b'{"prompt": "x", "temperature": 1e999}', id="infinite"),
        pytest.param(b'{"prompt": "x", "temperature": -Infinity}', id="-Infinity"),
        pytest.param(b'{"prompt": ' + b"[" * 100_000, id="deep"),
        pytest.param(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep and closed"),
    ],
)
def test_not_json(server: Served, content: bytes) -> None:
    status, error = bad(server, "/v1/completions", content)
    assert (status, error["code"], error["type"]) == (400, "invalid_json", "invalid_request_error")
    assert len(error["message"]) < 200


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_other_content_types(server: Served, kind: str) -> None:
    assert bad(server, "/v1/chat/completions", json.dumps(chat()).encode(), kind)[0] == 415


CHAT_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "0.5"}, "temperature", TEXT),
    ({"temperature": True}, "temperature", TEXT),
    ({"temperature": -0.1}, "temperature", TEXT),
    ({"temperature": 100.1}, "temperature", TEXT),
    ({"top_p": 1.01}, "top_p", TEXT),
    ({"min_p": -1}, "min_p", TEXT),
    ({"top_k": -2}, "top_k", TEXT),
    ({"top_k": 1.0}, "top_k", TEXT),
    ({"repeat_penalty": 0}, "repeat_penalty", TEXT),
    ({"repetition_penalty": -1}, "repetition_penalty", TEXT),
    ({"repeat_last_n": -1}, "repeat_last_n", TEXT),
    ({"presence_penalty": 2.5}, "presence_penalty", TEXT),
    ({"frequency_penalty": -2.5}, "frequency_penalty", TEXT),
    ({"n": True}, "n", TEXT),
    ({"n": 0}, "n", TEXT),
    ({"n": 5}, "n", TEXT),  # the server has 4 slots
    ({"n": 10**6}, "n", TEXT),
    ({"max_tokens": 0}, "max_tokens", TEXT),
    ({"max_tokens": -2}, "max_tokens", TEXT),
    ({"max_tokens": 2**63}, "max_tokens", TEXT),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens", TEXT),
    ({"seed": -2}, "seed", TEXT),
    ({"seed": 2**64}, "seed", TEXT),
    ({"seed": 10**100}, "seed", TEXT),
    ({"seed": 1.0}, "seed", TEXT),
    ({"seed": "1"}, "seed", TEXT),
    ({"stop": ""}, "stop", TEXT),
    ({"stop": ["a"] * 17}, "stop", TEXT),
    ({"stop": ["a" * 257]}, "stop", TEXT),
    ({"stop": [1]}, "stop", TEXT),
    ({"stop": {"a": 1}}, "stop", TEXT),
    ({"logit_bias": {"1": 101}}, "logit_bias", TEXT),
    ({"logit_bias": {"a": 1}}, "logit_bias", TEXT),
    ({"logit_bias": {"-1": 1}}, "logit_bias", TEXT),
    ({"logit_bias": {"1": True}}, "logit_bias", TEXT),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", TEXT),
    ({"logit_bias": {"1000": 1}}, "logit_bias", TEXT),  # the engine's word
    ({"stream": "yes"}, "stream", TEXT),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", TEXT),
    ({"messages": []}, "messages", TEXT),
    ({"messages": "hi"}, "messages", TEXT),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", TEXT),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_field"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", TEXT),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        UNSUPPORTED,
    ),
    ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content", TEXT),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0]", UNSUPPORTED),
    ({"messages": ["x"] * 100_000}, "messages[0]", TEXT),
    ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages", TEXT),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", TEXT),
    ({"chat_template_kwargs": {"messages": ""}}, "chat_template_kwargs", TEXT),
    ({"chat_template_kwargs": {"__class__": ""}}, "chat_template_kwargs", TEXT),
    ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs", TEXT),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", TEXT),
    ({"continue_final_message": True}, "continue_final_message", TEXT),  # the last message is the user's
    ({"speculative": 3}, "speculative", TEXT),
    ({"speculative": {"n_max": -1}}, "speculative.n_max", TEXT),
    ({"speculative.n_max": True}, "speculative.n_max", TEXT),
    ({"speculative.p_min": 1.5}, "speculative.p_min", TEXT),
    ({"speculative.k": 1}, "speculative.k", TEXT),
    ({"speculative.ngram_size_n": 0}, "speculative.ngram_size_n", TEXT),
    ({"speculative": {"ngram_size_m": 1025}}, "speculative.ngram_size_m", TEXT),
    ({"speculative.ngram_min_hits": 1.0}, "speculative.ngram_min_hits", TEXT),
    ({"speculative": {"ngram_size": 3}}, "speculative.ngram_size", TEXT),
    ({"speculative": {"type": "x"}}, "speculative.type", TEXT),
    ({"speculative": {"n_max": 1}, "speculative.n_max": 1}, "speculative.n_max", TEXT),
    ({"speculative.types": "none,ngram-simple"}, "speculative.types", TEXT),
    ({"speculative.types": ""}, "speculative.types", TEXT),
    ({"speculative.types": "warp"}, "speculative.types", UNSUPPORTED),  # the engine's word
    ({"tools": [{}]}, "tools", UNSUPPORTED),
    ({"tool_choice": "required"}, "tool_choice", UNSUPPORTED),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"logprobs": True}, "logprobs", UNSUPPORTED),
    ({"top_logprobs": 2}, "top_logprobs", UNSUPPORTED),
    ({"response_format": {"type": "json_object"}}, "response_format", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"audio": {}}, "audio", UNSUPPORTED),
    ({"prediction": "x"}, "prediction", TEXT),
    ({"prediction": {}}, "prediction.type", "missing_field"),
    ({"prediction": {"type": "content"}}, "prediction.content", "missing_field"),
    ({"prediction": {"type": "tokens", "content": "x"}}, "prediction.type", UNSUPPORTED),
    ({"prediction": {"type": 1, "content": "x"}}, "prediction.type", TEXT),
    ({"prediction": {"type": "content", "content": None}}, "prediction.content", TEXT),
    ({"prediction": {"type": "content", "content": ["x"]}}, "prediction.content", TEXT),
    ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content", TEXT),
    (
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        "prediction.content",
        UNSUPPORTED,
    ),
    ({"prediction": {"type": "content", "content": "x", "weight": 1}}, "prediction.weight", TEXT),
    ({"web_search_options": {}}, "web_search_options", UNSUPPORTED),
    ({"grammar": "root ::= x"}, "grammar", UNSUPPORTED),
    ({"json_schema": {}}, "json_schema", UNSUPPORTED),
    ({"n_probs": 1}, "n_probs", UNSUPPORTED),
    ({"mirostat": 2}, "mirostat", UNSUPPORTED),
    ({"chat_template": "x"}, "chat_template", UNSUPPORTED),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"), CHAT_CASES, ids=[f"{i}-{case[1]}" for i, case in enumerate(CHAT_CASES)]
)
def test_chat_fields(server: Served, fields: dict[str, Any], param: str, code: str) -> None:
    error = server.error(400, **fields)
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"].startswith(param)
    assert len(error["message"]) < 300
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "prompt", "missing_field"),
        ({"prompt": None}, "prompt", TEXT),
        ({"prompt": ""}, "prompt", TEXT),
        ({"prompt": []}, "prompt", TEXT),
        ({"prompt": [[]]}, "prompt", TEXT),
        ({"prompt": [1, "a"]}, "prompt", TEXT),
        ({"prompt": [-1]}, "prompt", TEXT),
        ({"prompt": [True]}, "prompt", TEXT),
        ({"prompt": [1000]}, "prompt", TEXT),  # the engine's word
        ({"prompt": ["a"] * 69}, "prompt", TEXT),  # 4 slots and a queue of 64
        ({"prompt": "a", "echo": True}, "echo", UNSUPPORTED),
        ({"prompt": "a", "suffix": "b"}, "suffix", UNSUPPORTED),
        ({"prompt": "a", "best_of": 2}, "best_of", UNSUPPORTED),
        ({"prompt": "a", "logprobs": 0}, "logprobs", UNSUPPORTED),
    ],
)
def test_completion_fields(server: Served, fields: dict[str, Any], param: str, code: str) -> None:
    answer = server.post("/v1/completions", fields)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
    assert not server.engine.requests


@pytest.mark.parametrize("value", ["secret-" * 9, {"secret": "secret"}, ["secret"] * 1000])
def test_input_is_never_told_back(server: Served, value: Any) -> None:
    names = ("temperature", "stop", "messages", "seed", "speculative.types", "logit_bias", "prediction")
    for name in names:
        answer = server.chat(**{name: value})
        assert "secret" not in answer.text
    answer = server.chat(prediction={"type": "secret", "content": value})
    assert answer.status_code == 400
    assert "secret" not in answer.text


def test_field_names_are_told_back_short_and_printable(server: Served) -> None:
    error = server.error(400, **{"speculative." + "x\n\x1b" * 100: 1})
    assert "\n" not in error["message"]
    assert len(error["param"]) < 80


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False},
        {"logprobs": None},
        {"tools": []},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"typical_p": 1.0, "mirostat": 0, "dry_multiplier": 0.0, "dry_base": 1.75},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"stream_options": {"include_usage": True}},
        {"nobody_knows": [1]},
        {"prediction": None},
    ],
)
def test_what_asks_for_nothing_is_fine(server: Served, fields: dict[str, Any]) -> None:
    assert server.chat(**fields).status_code == 200


def test_strict_api() -> None:
    with served(strict_api=True) as server:
        assert server.chat(user="u", stop=["x"]).status_code == 200
        error = server.error(400, nobody_knows=1)
        assert (error["param"], error["code"]) == ("nobody_knows", "unknown_field")
        assert server.error(400, stream_options={"include_usage": True})["param"] == "stream_options"


def test_body_limit() -> None:
    with served(max_body=1) as server:
        assert server.chat().status_code == 200
        server.engine.requests.clear()
        big = b"x" * ((1 << 20) + 1)
        answer = server.http.post(
            "/v1/completions", content=big, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"

        def pieces() -> Any:
            yield b'{"prompt": "'
            for _ in range(17):
                yield b"x" * (1 << 16)
            yield b'"}'

        answer = server.http.post(
            "/v1/completions", content=pieces(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        lied = raw(
            server.port,
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 9999999999999999999\r\n\r\n{}",
        )
        assert lied.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
        assert not server.engine.requests
        assert server.chat().status_code == 200


def test_a_huge_header_is_refused(server: Served) -> None:
    answer = raw(server.port, b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 5_000_000)
    assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert server.http.get("/health").status_code == 200
