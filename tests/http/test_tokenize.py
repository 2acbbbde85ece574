"""`/tokenize` and `/detokenize`, in llama-server's form and in vLLM's."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.engine.api import Chat
from tests.http.fake import N_CTX
from tests.http.serving import Served, served

TALK = [{"role": "user", "content": "one two"}]


def tokens(server: Served, **fields: Any) -> dict[str, Any]:
    answer = server.post("/tokenize", fields)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_text(server: Served) -> None:
    assert tokens(server, content="ab") == {"tokens": [97, 98]}
    assert tokens(server, content="ab", add_special=True) == {"tokens": [1, 97, 98]}
    assert tokens(server, prompt="ab") == {"tokens": [1, 97, 98], "count": 3, "max_model_len": N_CTX}


def test_what_is_null_is_absent(server: Served) -> None:
    assert tokens(server, content="ab", add_special=None, messages=None, prompt=None) == {"tokens": [97, 98]}
    assert server.post("/detokenize", {"tokens": None}).json()["content"] == ""


def test_a_conversation_is_what_a_request_with_it_would_be(server: Served) -> None:
    told = tokens(server, messages=TALK)
    assert told == {"tokens": told["tokens"], "count": 3, "max_model_len": N_CTX}
    server.chat(messages=TALK)
    assert isinstance(server.engine.requests[-1].prompt, Chat)
    assert server.chat(messages=TALK).json()["usage"]["prompt_tokens"] == told["count"]
    answer = server.post("/tokenize", {"messages": [{"role": "user"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")


def test_a_strict_server_knows_the_fields_of_both_forms() -> None:
    with served(strict_api=True) as server:
        told = tokens(server, messages=TALK, with_pieces=True, add_generation_prompt=False)
        assert len(told["tokens"]) == told["count"] == 3
        assert server.post("/tokenize", {"content": "a", "add_generation_prompt": True}).status_code == 400


def test_a_piece_that_is_no_text_is_its_bytes(server: Served) -> None:
    pieces = tokens(server, content="a\xe9", with_pieces=True)["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 0xE9, "piece": [0xE9]}]


@pytest.mark.parametrize("token", [1000, 2**31 - 1])
def test_an_id_that_no_token_has_is_refused(server: Served, token: int) -> None:
    answer = server.post("/detokenize", {"tokens": [97, token]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize("body", [{"prompt": "ab"}, {"messages": TALK}])
def test_the_vocabularys_own_spelling_is_refused_by_name(server: Served, body: dict[str, Any]) -> None:
    answer = server.post("/tokenize", {**body, "return_token_strs": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "return_token_strs",
        "unsupported_value",
    )
    assert "with_pieces" in error["message"]
    with served(strict_api=True) as strict:
        assert tokens(strict, **body, return_token_strs=False)["count"] > 0
