"""`openai`: chat and Responses; plain calls, the helpers that accumulate streams and parse, the async client."""

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


def test_responses(client: Any, question: Any) -> None:
    first = client.responses.create(model="demo", input=question, max_output_tokens=MAX_TOKENS)
    assert first.output_text
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    second = client.responses.create(
        model="demo", input="Again.", previous_response_id=first.id, max_output_tokens=MAX_TOKENS
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert [one.content[0].text for one in client.responses.input_items.list(second.id)] == ["Again."]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_streamed_responses_say_the_same(client: Any, question: Any) -> None:
    asked = {"model": "demo", "input": question, "temperature": 0, "max_output_tokens": 500, "store": False}
    asked["extra_body"] = {"stop": ["\n"]}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
        told = stream.get_final_response()
    assert told.output_text == whole.output_text == "".join(deltas) != ""
    assert told.usage == whole.usage or told.usage.output_tokens == whole.usage.output_tokens


def test_functions_of_responses(client: Any, question: Any, tool: Any) -> None:
    flat = {"type": "function", **tool["function"]}
    asked = {"model": "demo", "input": question, "tools": [flat], "tool_choice": "required", "temperature": 0}
    asked |= {"max_output_tokens": MAX_JSON_TOKENS, "parallel_tool_calls": False}
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        reply = stream.get_final_response()
    (call,) = [one for one in reply.output if one.type == "function_call"]
    Finding.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    after = client.responses.create(
        model="demo", input=[output], previous_response_id=reply.id, max_output_tokens=MAX_TOKENS
    )
    assert after.status in ("completed", "incomplete")


def test_json_of_a_schema_in_responses(client: Any, question: Any) -> None:
    asked = {"model": "demo", "input": question, "text_format": Finding, "max_output_tokens": MAX_JSON_TOKENS}
    assert isinstance(client.responses.parse(**asked).output_parsed, Finding)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Finding)


def test_a_response_in_the_background(client: Any, question: Any) -> None:
    made = client.responses.create(model="demo", input=question, background=True, max_output_tokens=1000)
    assert made.status == "in_progress"
    assert client.responses.cancel(made.id).status in ("cancelled", "completed", "incomplete")
