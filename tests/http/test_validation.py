"""What asks for nothing is fine, and limits that have a setting hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.serving import Served, raw, served


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
