"""How long thinking may be: the fields of vLLM, llama-server and Anthropic, and the server's own limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slipstream.engine.constraints import ThinkingBudget
from tests.http.fake import INFO
from tests.http.serving import Served, chat, served

TAGS = ("<think>", "</think>")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"prompt": "a b"},
    "/completion": {"prompt": "a b"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}
THINKER = replace(INFO, chat_template="{{ messages }}<think></think>")
NAMES = ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens")


@pytest.fixture(autouse=True)
def thinks(server: Served) -> Iterator[None]:
    server.engine.info = THINKER
    yield
    server.engine.info = INFO


def budget(server: Served, path: str, **fields: Any) -> ThinkingBudget | None:
    answer = server.post(path, {**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1].thinking_budget


@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_takes_every_name(server: Served, path: str) -> None:
    for name in NAMES:
        assert budget(server, path, **{name: 100}) == ThinkingBudget(100, TAGS)
        assert budget(server, path, **{name: 0}) == ThinkingBudget(0, TAGS)
        for none in (-1, None):
            assert budget(server, path, **{name: none}) is None
        error = server.post(path, {**BODIES[path], name: -2}).json()["error"]
        assert name in error["message"]
    assert budget(server, path) is None
    said = budget(server, path, thinking_token_budget=3, reasoning_budget_message="So:")
    assert said == ThinkingBudget(3, TAGS, "So:")
    both = budget(server, path, thinking_token_budget=3, thinking_budget_tokens=4, reasoning_budget_tokens=5)
    assert both == ThinkingBudget(3, TAGS)


def test_anthropics_own_field(server: Served) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert budget(server, "/v1/messages", thinking=thinking) == ThinkingBudget(2048, TAGS)
    assert budget(server, "/v1/messages", thinking={"type": "enabled"}, thinking_token_budget=5) == (
        ThinkingBudget(5, TAGS)
    )


@pytest.fixture(scope="module")
def limited() -> Iterator[Served]:
    with served(reasoning_budget=64, reasoning_budget_message="Enough.") as server:
        server.engine.info = THINKER
        yield server


def test_the_servers_limit_is_for_conversations(limited: Served) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert budget(limited, path) == ThinkingBudget(64, TAGS, "Enough.")
        assert budget(limited, path, thinking_token_budget=7) == ThinkingBudget(7, TAGS, "Enough.")
        assert budget(limited, path, thinking_token_budget=-1) is None
        assert budget(limited, path, reasoning_budget_message="") == ThinkingBudget(64, TAGS)
    for path in ("/v1/completions", "/completion"):
        assert budget(limited, path) is None
        assert budget(limited, path, thinking_token_budget=7) == ThinkingBudget(7, TAGS, "Enough.")


def test_no_thinking_by_default() -> None:
    with served(reasoning_budget=0) as server:
        server.engine.info = THINKER
        assert budget(server, "/v1/chat/completions") == ThinkingBudget(0, TAGS)
        assert server.engine.requests[-1].prompt.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("chat_format", "markers"),
    [("harmony", ("<|channel|>analysis<|message|>", "<|end|>")), ("mistral", ("[THINK]", "[/THINK]"))],
)
def test_markers_are_those_of_the_format(chat_format: str, markers: tuple[str, str]) -> None:
    with served(chat_format=chat_format) as server:
        server.engine.info = replace(
            INFO, chat_template="[TOOL_CALLS][THINK]", added_tokens={"[/THINK]": True}
        )
        assert budget(server, "/v1/chat/completions", thinking_token_budget=9) == ThinkingBudget(9, markers)


def test_a_format_without_thinking_has_nothing_to_cut() -> None:
    with served(chat_format="none") as server:
        assert budget(server, "/v1/chat/completions", thinking_token_budget=9) is None
