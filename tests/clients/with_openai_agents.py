"""`openai-agents`: agents with tools, models as output, handoffs and conversations, over chat and over Responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from conftest import MAX_JSON_TOKENS, QUESTION, Finding
from openai.types.shared import Reasoning

set_tracing_disabled(True)
# Over Responses the client takes a reply that was cut for an error; a reply that has all of a pattern ends by itself.
ENDING = {"extra_body": {"guided_regex": "[A-Za-z ]{12,24}"}}


@function_tool
def look(name: str, count: int) -> str:
    """Looks it up."""
    return f"{count} of {name}"


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def make(request: Any) -> Any:
    """Makes an agent over chat completions, and over Responses."""

    def agent(url: str, settings: Any = ENDING, **more: Any) -> Agent[Any]:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        model = request.param(model="demo", openai_client=client)
        asked = ModelSettings(**{"temperature": 0, **settings})
        return Agent(name="demo", instructions="Be short.", model=model, model_settings=asked, **more)

    agent.model = request.param
    return agent


def run(*arguments: Any, **named: Any) -> Any:
    return asyncio.run(Runner.run(*arguments, **named))


def test_text(url: str, make: Any) -> None:
    result = run(make(url), QUESTION)
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


def test_streaming_says_the_same(url: str, make: Any) -> None:
    async def ask() -> tuple[str, str]:
        streamed = Runner.run_streamed(make(url), QUESTION)
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert len(deltas) > 1
        return "".join(deltas), streamed.final_output

    deltas, final = asyncio.run(ask())
    assert deltas == final == run(make(url), QUESTION).final_output


def test_a_tool(url: str, make: Any) -> None:
    settings = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": MAX_JSON_TOKENS}
    result = run(make(url, settings, tools=[look], tool_use_behavior="stop_on_first_tool"), QUESTION)
    kinds = [one.type for one in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item"]
    assert " of " in result.final_output


def test_a_model_as_the_output(url: str, make: Any) -> None:
    result = run(make(url, {"max_tokens": MAX_JSON_TOKENS}, output_type=Finding), QUESTION)
    assert isinstance(result.final_output, Finding)


def test_a_handoff(url: str, make: Any) -> None:
    other = make(url)
    settings = {"tool_choice": "required", "max_tokens": MAX_JSON_TOKENS}
    result = run(make(url, settings, handoffs=[other]), QUESTION)
    assert result.last_agent is other
    assert result.final_output


def test_a_conversation_is_sent_again(url: str, make: Any) -> None:
    first = run(make(url), QUESTION)
    again = run(make(url), [*first.to_input_list(), {"role": "user", "content": "Again."}])
    assert again.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens


@pytest.mark.parametrize("more", [{}, {"store": False, "response_include": ["reasoning.encrypted_content"]}])
def test_thinking_comes_back_with_a_tools_result(thinking_url: str, make: Any, more: Any) -> None:
    result = run(make(thinking_url, {"reasoning": Reasoning(summary="auto"), **more}, tools=[look]), QUESTION)
    thoughts = [
        one.raw_item.summary[0].text.strip() for one in result.new_items if one.type == "reasoning_item"
    ]
    assert thoughts == ["I need it.", "I need it."]
    # Over chat the client keeps it to itself.
    gives_back = make.model is OpenAIResponsesModel
    assert result.final_output == "You said: " + "I need it." * gives_back
