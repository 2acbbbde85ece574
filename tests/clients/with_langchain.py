"""`langchain-openai`: messages, streams, bound tools, structured output by schema and by tool."""

from __future__ import annotations

import asyncio
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


def model(url: str, **settings: Any) -> ChatOpenAI:
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0, "seed": 1, "stream_usage": True, **settings}
    return ChatOpenAI(base_url=url, api_key="none", model="demo", max_retries=0, timeout=120, **settings)


def test_chat(url: str) -> None:
    reply = model(url).invoke([("system", "Be short."), ("user", QUESTION)])
    assert reply.content
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["output_tokens"] > 0


def test_streaming_says_the_same(url: str) -> None:
    whole = model(url).invoke(QUESTION)
    chunks = list(model(url).stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
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
    assert after.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")


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


async def _ask(url: str) -> Any:
    return await model(url).ainvoke(QUESTION)


def test_async(url: str) -> None:
    assert asyncio.run(_ask(url)).content == model(url).invoke(QUESTION).content
