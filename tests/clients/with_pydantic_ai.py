"""`pydantic-ai-slim`: agents with text, tools and models as output."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from conftest import MAX_JSON_TOKENS, MAX_TOKENS, QUESTION, Finding
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], autouse=True)
def api(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs over chat completions and over Responses."""
    monkeypatch.setattr(sys.modules[__name__], "MODEL", request.param)


MODEL: Any = OpenAIChatModel


def agent(url: str, max_tokens: int = MAX_TOKENS, **more: Any) -> Agent[None, Any]:
    model = MODEL("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
    settings = {"max_tokens": max_tokens, "temperature": 0.0, "timeout": 120.0}
    return Agent(model, model_settings=settings, retries=0, **more)


def test_chat(url: str) -> None:
    result = agent(url, system_prompt="Be short.").run_sync(QUESTION)
    assert result.output


def test_streaming_says_the_same(url: str) -> None:
    async def ask() -> str:
        async with agent(url).run_stream(QUESTION) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
            assert len(pieces) > 1
            return "".join(pieces)

    assert asyncio.run(ask()) == agent(url).run_sync(QUESTION).output


@pytest.mark.parametrize("output", [NativeOutput(Finding), ToolOutput(Finding, name="look")])
def test_a_model_as_the_output(url: str, output: Any) -> None:
    result = agent(url, MAX_JSON_TOKENS, output_type=output).run_sync(QUESTION)
    assert isinstance(result.output, Finding)


@pytest.mark.parametrize("output", [NativeOutput(Finding), ToolOutput(Finding, name="look")])
def test_a_model_as_the_output_while_streaming(url: str, output: Any) -> None:
    async def ask() -> Any:
        async with agent(url, MAX_JSON_TOKENS, output_type=output).run_stream(QUESTION) as stream:
            return await stream.get_output()

    assert asyncio.run(ask()) == agent(url, MAX_JSON_TOKENS, output_type=output).run_sync(QUESTION).output


def test_tools_are_offered(url: str) -> None:
    """The model may call the tool and need not."""
    one = agent(url)

    @one.tool_plain
    def look(name: str) -> str:
        """Looks it up."""
        return f"found {name}"

    assert isinstance(one.run_sync(QUESTION).output, str)


# The client gives thinking back as it came: as the content of an item, or encrypted, beside the summary it shows.
SEALED = {"openai_supports_encrypted_reasoning_content": True, "supports_thinking": True}


@pytest.mark.parametrize(("settings", "profile"), [({}, {}), ({"openai_reasoning_summary": "auto"}, SEALED)])
def test_thinking_comes_back_with_a_tools_result(thinking_url: str, settings: Any, profile: Any) -> None:
    model = MODEL("any", provider=OpenAIProvider(base_url=thinking_url, api_key="none"), profile=profile)
    one = Agent(model, model_settings=settings, retries=0)

    @one.tool_plain
    def look(name: str, count: int) -> str:
        """Looks it up."""
        return f"{count} of {name}"

    result = one.run_sync(QUESTION)
    parts = [
        part for message in result.all_messages() for part in message.parts if part.part_kind == "thinking"
    ]
    thoughts = [part.content or part.provider_details["raw_content"][0] for part in parts]
    assert [thought.strip() for thought in thoughts] == ["I need it."] * 2
    assert result.output == "You said: I need it."
