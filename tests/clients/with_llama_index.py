"""`llama-index` over chat, plain completions and Responses: text, streams, models, tools, agents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import MAX_JSON_TOKENS, MAX_TOKENS, QUESTION, Finding
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client's own
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "api_key": "none",
    "max_retries": 0,
    "timeout": 120,
    "temperature": 0,
}


def chat(url: str, max_tokens: int = MAX_TOKENS, **more: Any) -> OpenAILike:
    more = {"is_chat_model": True, "is_function_calling_model": True, **more}
    return OpenAILike(api_base=url, max_tokens=max_tokens, context_window=2048, **SETTINGS, **more)


def responses(url: str, max_tokens: int = MAX_TOKENS, **more: Any) -> OpenAIResponses:
    return OpenAIResponses(
        api_base=url, max_output_tokens=max_tokens, context_window=2048, **SETTINGS, **more
    )


@pytest.fixture(params=[chat, responses])
def make(request: Any) -> Any:
    """Each test runs over chat completions and over Responses."""
    return request.param


def look(name: str, count: int) -> str:
    """Looks it up."""
    return f"{count} of {name}"


TOOL = FunctionTool.from_defaults(look, fn_schema=Finding)
MESSAGES = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content=QUESTION)]


def test_chat(url: str, make: Any) -> None:
    assert make(url).chat(MESSAGES).message.content


def test_streaming_says_the_same(url: str, make: Any) -> None:
    pieces = list(make(url).stream_chat(MESSAGES))
    assert len(pieces) > 1
    assert "".join(one.delta or "" for one in pieces) == make(url).chat(MESSAGES).message.content


@pytest.mark.parametrize("more", [{}, {"should_use_structured_outputs": True}])
def test_a_model_as_the_answer(url: str, more: Any) -> None:
    found = chat(url, MAX_JSON_TOKENS, **more).structured_predict(Finding, PromptTemplate(QUESTION))
    assert isinstance(found, Finding)


def test_a_model_as_the_answer_of_responses(url: str) -> None:
    found = responses(url, MAX_JSON_TOKENS).structured_predict(Finding, PromptTemplate(QUESTION))
    assert isinstance(found, Finding)


def test_a_model_while_it_is_written(url: str) -> None:
    # Where it streams a tool's arguments, the client leaves it to the model whether to call it.
    model = chat(url, MAX_JSON_TOKENS, should_use_structured_outputs=True)
    parts = list(model.stream_structured_predict(Finding, PromptTemplate(QUESTION)))
    assert len(parts) > 1
    Finding.model_validate(parts[-1].model_dump())


def test_tools(url: str, make: Any) -> None:
    model = make(url, MAX_JSON_TOKENS)
    reply = model.chat_with_tools(
        [TOOL], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False
    )
    (call,) = model.get_tool_calls_from_response(reply)
    assert call.tool_name == "look"
    Finding.model_validate(call.tool_kwargs)
    told = ChatMessage(role="tool", content="found", additional_kwargs={"tool_call_id": call.tool_id})
    history = [*MESSAGES, reply.message, told]
    assert model.chat_with_tools([TOOL], chat_history=history).message.role == "assistant"


def test_tools_while_streaming(url: str, make: Any) -> None:
    model = make(url, MAX_JSON_TOKENS)
    asked = {"user_msg": QUESTION, "tool_required": True, "allow_parallel_tool_calls": False}
    whole = model.get_tool_calls_from_response(model.chat_with_tools([TOOL], **asked))
    *_, last = model.stream_chat_with_tools([TOOL], **asked)
    calls = model.get_tool_calls_from_response(last)
    assert [one.tool_kwargs for one in calls] == [one.tool_kwargs for one in whole]


def test_an_agent(url: str, make: Any) -> None:
    """The model has to call the tool at first, and answers then."""

    async def ask() -> Any:
        model = make(url, MAX_JSON_TOKENS)
        agent = FunctionAgent(
            tools=[TOOL], llm=model, initial_tool_choice="look", allow_parallel_tool_calls=False
        )
        return await agent.run(QUESTION)

    output = asyncio.run(ask())
    assert [one.tool_name for one in output.tool_calls][:1] == ["look"]


def test_completions(url: str) -> None:
    model = chat(url, is_chat_model=False)
    whole = model.complete("def add(a, b):\n").text
    assert whole
    assert "".join(one.delta or "" for one in model.stream_complete("def add(a, b):\n")) == whole


def test_responses_go_on_from_one_another(url: str) -> None:
    model = responses(url, track_previous_responses=True)
    first = model.chat(MESSAGES)
    second = model.chat([ChatMessage(role="user", content="Again.")])
    assert second.raw.previous_response_id == first.raw.id
    assert second.raw.usage.input_tokens > first.raw.usage.input_tokens
