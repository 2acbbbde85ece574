"""`litellm`: its OpenAI-compatible route, as gateways and agents use it."""

from __future__ import annotations

import os
from typing import Any

import pytest
from conftest import MAX_JSON_TOKENS, MAX_TOKENS, Finding

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a price list when imported

import litellm

litellm.telemetry = False


def ask(url: str, **fields: Any) -> Any:
    asked = {"model": "openai/demo", "api_base": url, "api_key": "none", "num_retries": 0, "timeout": 120}
    return litellm.completion(**{**asked, "temperature": 0, "seed": 1, "max_tokens": MAX_TOKENS, **fields})


def test_chat(url: str, question: Any) -> None:
    reply = ask(url, messages=question)
    assert reply.choices[0].message.content
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_streaming_says_the_same(url: str, question: Any) -> None:
    chunks = list(ask(url, messages=question, stream=True, stream_options={"include_usage": True}))
    told = litellm.stream_chunk_builder(chunks)
    whole = ask(url, messages=question)
    assert told.choices[0].message.content == whole.choices[0].message.content
    assert told.choices[0].finish_reason == whole.choices[0].finish_reason
    assert told.usage.completion_tokens == whole.usage.completion_tokens


def test_tools(url: str, question: Any, tool: Any) -> None:
    asked = {"messages": question, "tools": [tool], "tool_choice": "required", "max_tokens": MAX_JSON_TOKENS}
    reply = ask(url, **asked, parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "look"
    Finding.model_validate_json(call.function.arguments)
    told = litellm.stream_chunk_builder(list(ask(url, **asked, parallel_tool_calls=False, stream=True)))
    (same,) = told.choices[0].message.tool_calls
    assert same.function.arguments == call.function.arguments
    assert told.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema(url: str, question: Any, stream: bool) -> None:
    reply = ask(url, messages=question, response_format=Finding, max_tokens=MAX_JSON_TOKENS, stream=stream)
    if stream:
        reply = litellm.stream_chunk_builder(list(reply))
    Finding.model_validate_json(reply.choices[0].message.content)


def test_errors(url: str, question: Any) -> None:
    with pytest.raises(litellm.BadRequestError):
        ask(url, messages=question, temperature=-1)
