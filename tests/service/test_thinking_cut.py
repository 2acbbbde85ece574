"""A server whose model never stops thinking by itself: thinking is cut, and the text is the same with drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.process import DEMO, forked

# The demo's way to write turns, with thinking opened for the model.
TEMPLATE = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}"
)
SAID = [{"role": "user", "content": "Write the docstring:\n\ndef add(a, b):\n    return a + b\n"}]
BUDGET = 12


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("thinking") / "log"
    flags = ("--ctx-size", "512", "--parallel", "2", "--threads", "1", "--chat-template", TEMPLATE)
    flags += ("--no-spec-adaptive",)  # what is verified does not hang on what passes take
    with forked(log, (*DEMO, *flags)) as server:
        with httpx.Client(base_url=server.url, timeout=60) as one:
            yield one
        assert not server.surprises()


def reply(http: httpx.Client, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    """Thinking, content and the whole answer."""
    body = {"messages": SAID, "max_tokens": 60, "ignore_eos": True, "seed": 3, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    return message.get("reasoning_content") or "", message["content"] or "", answer.json()


def test_thinking_ends_behind_so_many_tokens(http: httpx.Client) -> None:
    free, nothing, whole = reply(http)
    assert (bool(free), nothing) == (True, "")
    # A draft model's guess goes on behind what is forced, and may be taken for it.
    cut = {"thinking_token_budget": BUDGET, "reasoning_budget_message": "\nEnough."}
    thoughts, content, answer = reply(http, **cut, speculative={"types": "suffix"})
    begun = http.post("/detokenize", json={"tokens": whole["choices"][0]["token_ids"][:BUDGET]}).json()
    assert thoughts.strip() == (begun["content"] + "\nEnough.").strip()
    assert content
    assert BUDGET < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < 40
    assert answer["usage"]["completion_tokens"] == 60
    assert answer["timings"]["drafters"]["forced"]["draft_n_accepted"] > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_nothing(http: httpx.Client, temperature: float) -> None:
    asked = {"thinking_token_budget": BUDGET, "temperature": temperature}
    plain = reply(http, **asked, speculative={"types": "none"})
    for speculative in ({"types": "auto"}, {"types": "draft-model"}, {"types": "suffix", "n_max": 2}):
        drafted = reply(http, **asked, speculative=speculative)
        assert drafted[2]["choices"][0]["token_ids"] == plain[2]["choices"][0]["token_ids"]
        assert drafted[:2] == plain[:2]


def test_a_schema_holds_behind_the_cut(http: httpx.Client) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    for types in ("none", "auto"):
        thoughts, content, _ = reply(
            http,
            thinking_token_budget=BUDGET,
            json_schema=schema,
            ignore_eos=False,
            speculative={"types": types},
        )
        assert thoughts
        assert content in ('{"a": true}', '{"a": false}')
