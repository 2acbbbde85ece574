"""`litellm`: its OpenAI-compatible routes, as gateways and agents use them; chat and Responses."""

from __future__ import annotations

import os
from typing import Any

import pytest
from conftest import MAX_JSON_TOKENS, MAX_TOKENS, Finding

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a price list when imported

import litellm

litellm.telemetry = False
pytestmark = pytest.mark.filterwarnings("ignore")  # the client's own


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


def respond(url: str, **fields: Any) -> Any:
    asked = {"model": "openai/demo", "api_base": url, "api_key": "none", "num_retries": 0, "timeout": 120}
    return litellm.responses(**{**asked, "temperature": 0, "max_output_tokens": MAX_TOKENS, **fields})


def test_responses(url: str, question: Any) -> None:
    first = respond(url, input=question, instructions="Be short.")
    assert first.output[0].content[0].text
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    second = respond(url, input="Again.", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens


def test_streamed_responses_say_the_same(url: str, question: Any) -> None:
    whole = respond(url, input=question)
    events = list(respond(url, input=question, stream=True))
    told = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert told == whole.output[0].content[0].text != ""
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_functions_of_responses(url: str, question: Any, tool: Any) -> None:
    asked = {
        "input": question,
        "tools": [{"type": "function", **tool["function"]}],
        "tool_choice": "required",
    }
    reply = respond(url, **asked, max_output_tokens=MAX_JSON_TOKENS, parallel_tool_calls=False)
    (call,) = [one for one in reply.output if one.type == "function_call"]
    Finding.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    after = respond(url, input=[*question, dict(call), output], store=False)
    assert after.status in ("completed", "incomplete")


def test_a_chat_model_behind_responses(url: str, question: Any) -> None:
    """litellm's bridge: what its callers ask of chat goes to Responses."""
    reply = ask(url, messages=question, model="openai/responses/demo", seed=None)
    assert reply.choices[0].message.content


def test_errors_of_responses(url: str, question: Any) -> None:
    with pytest.raises(litellm.BadRequestError):
        respond(url, input=question, temperature=-1)


def test_thinking_comes_back_with_a_tools_result(thinking_url: str, question: Any, tool: Any) -> None:
    reply = ask(thinking_url, messages=question, tools=[tool]).choices[0].message
    assert reply.reasoning_content.strip() == "I need it."
    (call,) = reply.tool_calls
    found = {"role": "tool", "tool_call_id": call.id, "content": "found"}
    after = (
        ask(thinking_url, messages=[*question, reply.model_dump(), found], tools=[tool]).choices[0].message
    )
    assert after.content == "You said: I need it."


@pytest.mark.parametrize("more", [{}, {"store": False, "include": ["reasoning.encrypted_content"]}])
def test_thinking_in_responses(thinking_url: str, question: Any, tool: Any, more: Any) -> None:
    asked = {"tools": [{"type": "function", **tool["function"]}], "reasoning": {"summary": "auto"}, **more}
    first = respond(thinking_url, input=question, **asked)
    thought, call = first.output
    assert thought.summary[0].text.strip() == "I need it."
    found = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    items = [one.model_dump(exclude_none=True) for one in first.output]
    after = respond(thinking_url, input=[*question, *items, found], **asked)
    assert after.output[-1].content[0].text == "You said: I need it."
