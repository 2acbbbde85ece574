"""`openai`: plain calls, the streaming helper that accumulates chunks, the parsing helper, the async client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from conftest import MAX_JSON_TOKENS, MAX_TOKENS, Finding

# The streaming helper takes a reply that was cut for an error.
ENDING = {"stop": [".", "\n", ","], "max_tokens": 500}


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as one:
        yield one


def test_models(client: Any) -> None:
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id


def test_chat(client: Any, question: Any) -> None:
    reply = client.chat.completions.create(model="demo", messages=question, max_tokens=MAX_TOKENS, seed=1)
    assert reply.choices[0].message.content
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply._request_id


def test_streaming_says_the_same(client: Any, question: Any) -> None:
    asked = {"model": "demo", "messages": question, "seed": 1, "temperature": 0, **ENDING}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        told = stream.get_final_completion()
    assert told.choices[0].message.content == whole.choices[0].message.content
    assert told.choices[0].finish_reason == whole.choices[0].finish_reason
    assert told.usage.completion_tokens == whole.usage.completion_tokens


def test_several_choices_with_logprobs(client: Any, question: Any) -> None:
    with client.chat.completions.stream(
        model="demo", messages=question, n=2, seed=1, logprobs=True, top_logprobs=2, **ENDING
    ) as stream:
        for _ in stream:
            pass
        told = stream.get_final_completion()
    assert len(told.choices) == 2
    for choice in told.choices:
        assert choice.logprobs.content
        assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in choice.logprobs.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_tools(client: Any, question: Any, tool: Any, choice: Any) -> None:
    asked = {"model": "demo", "messages": question, "tools": [tool], "tool_choice": choice, "seed": 3}
    reply = client.chat.completions.create(**asked, max_tokens=MAX_JSON_TOKENS, parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls
    # OpenAI says "stop" where one tool was named; either is known to clients.
    assert reply.choices[0].finish_reason in ("tool_calls", "stop")
    assert call.function.name == "look"
    Finding.model_validate_json(call.function.arguments)
    answered = [
        *question,
        reply.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "found"},
    ]
    after = client.chat.completions.create(
        model="demo", messages=answered, tools=[tool], max_tokens=MAX_TOKENS
    )
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_tools_while_streaming(client: Any, question: Any, tool: Any) -> None:
    asked = {"model": "demo", "messages": question, "tools": [tool], "tool_choice": "required", "seed": 3}
    asked |= {"max_tokens": MAX_JSON_TOKENS, "parallel_tool_calls": False, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        told = stream.get_final_completion()
    (call,), (same,) = told.choices[0].message.tool_calls, whole.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == (same.function.name, same.function.arguments)
    assert told.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_of_a_schema(client: Any, question: Any, temperature: int) -> None:
    reply = client.chat.completions.parse(
        model="demo",
        messages=question,
        response_format=Finding,
        max_tokens=MAX_JSON_TOKENS,
        temperature=temperature,
        seed=5,
    )
    assert isinstance(reply.choices[0].message.parsed, Finding)


def test_any_json(client: Any, question: Any) -> None:
    format_ = {"type": "json_object"}
    asked = {"model": "demo", "messages": question, "response_format": format_, "max_tokens": MAX_JSON_TOKENS}
    reply = client.chat.completions.create(**asked, seed=5)
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
    assert reply.choices[0].message.content.lstrip().startswith("{")


def test_cut_json_is_told(client: Any, question: Any) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="demo", messages=question, response_format=Finding, max_tokens=2)


def test_completions(client: Any) -> None:
    reply = client.completions.create(
        model="demo", prompt="def add(a, b):\n", max_tokens=4, echo=True, logprobs=2
    )
    choice = reply.choices[0]
    assert choice.text.startswith("def add(a, b):\n")
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None


def test_errors(client: Any, question: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=question, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_many_at_once(url: str, question: Any) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            asked = {"model": "demo", "messages": question, "max_tokens": 8, "seed": 1}
            return await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(12)))

    replies = asyncio.run(ask())
    assert len({reply.choices[0].message.content for reply in replies}) == 1
