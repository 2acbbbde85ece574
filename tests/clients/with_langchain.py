"""`langchain-openai` over chat completions and over Responses: messages, streams, bound tools, structured output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import MAX_JSON_TOKENS, MAX_TOKENS, QUESTION, Finding
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI


@as_tool(args_schema=Finding)
def look(name: str, count: int) -> str:
    """Looks it up."""
    return f"{count} of {name}"


@pytest.fixture(params=[False, True], ids=["chat", "responses"], autouse=True)
def api(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs over chat completions and over Responses."""
    monkeypatch.setitem(SETTINGS, "use_responses_api", request.param)


SETTINGS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "stream_usage": True}


def model(url: str, **settings: Any) -> ChatOpenAI:
    settings = {**SETTINGS, **settings}
    return ChatOpenAI(base_url=url, api_key="none", model="demo", max_retries=0, timeout=120, **settings)


def test_chat(url: str) -> None:
    reply = model(url).invoke([("system", "Be short."), ("user", QUESTION)])
    assert reply.text
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["output_tokens"] > 0


def test_streaming_says_the_same(url: str) -> None:
    whole = model(url).invoke(QUESTION)
    chunks = list(model(url).stream(QUESTION))
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == whole.text != ""
    told = chunks[0]
    for chunk in chunks[1:]:
        told = told + chunk
    assert told.usage_metadata == whole.usage_metadata


@pytest.mark.parametrize("choice", ["required", "look"])
def test_tools(url: str, choice: str) -> None:
    bound = model(url, max_tokens=MAX_JSON_TOKENS).bind_tools(
        [look], tool_choice=choice, parallel_tool_calls=False
    )
    reply = bound.invoke(QUESTION)
    (call,) = reply.tool_calls
    assert call["name"] == "look"
    Finding.model_validate(call["args"])
    found = look.invoke(call)
    assert isinstance(found, ToolMessage)
    after = model(url).bind_tools([look]).invoke([HumanMessage(QUESTION), reply, found])
    assert after.text or after.tool_calls


def test_tools_while_streaming(url: str) -> None:
    bound = model(url, max_tokens=MAX_JSON_TOKENS).bind_tools(
        [look], tool_choice="required", parallel_tool_calls=False
    )
    chunks = list(bound.stream(QUESTION))
    told = chunks[0]
    for chunk in chunks[1:]:
        told = told + chunk
    assert told.tool_calls == [
        {**one, "id": told.tool_calls[0]["id"]} for one in bound.invoke(QUESTION).tool_calls
    ]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_json_of_a_schema(url: str, method: Any) -> None:
    asked = model(url, max_tokens=MAX_JSON_TOKENS).with_structured_output(Finding, method=method)
    assert isinstance(asked.invoke(QUESTION), Finding)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests: the client keeps its connections."""
    with asyncio.Runner() as one:
        yield one


def test_async(url: str, runner: asyncio.Runner) -> None:
    assert runner.run(model(url).ainvoke(QUESTION)).text == model(url).invoke(QUESTION).text


only_responses = pytest.mark.parametrize("api", [True], indirect=True)


@only_responses
def test_a_response_goes_on_from_another(url: str) -> None:
    first = model(url).invoke(QUESTION)
    told = first.response_metadata["id"]
    second = model(url).invoke("Again.", previous_response_id=told)
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    followed = model(url, use_previous_response_id=True).invoke(
        [HumanMessage(QUESTION), first, HumanMessage("Again.")]
    )
    assert followed.text == second.text


@only_responses
def test_a_conversation_is_sent_again(url: str) -> None:
    asked = model(url, store=False, include=["reasoning.encrypted_content"])
    first = asked.invoke(QUESTION)
    second = asked.invoke([HumanMessage(QUESTION), first, HumanMessage("Again.")])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


@only_responses
@pytest.mark.parametrize("more", [{}, {"store": False, "include": ["reasoning.encrypted_content"]}])
def test_thinking_comes_back_with_a_tools_result(thinking_url: str, more: Any) -> None:
    asked = model(thinking_url, reasoning={"summary": "auto"}, temperature=None, **more).bind_tools([look])
    first = asked.invoke(QUESTION)
    assert [one["reasoning"].strip() for one in first.content_blocks if one["type"] == "reasoning"] == [
        "I need it."
    ]
    found = [look.invoke(call) for call in first.tool_calls]
    assert asked.invoke([HumanMessage(QUESTION), first, *found]).text == "You said: I need it."
