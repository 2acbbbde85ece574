"""`anthropic`: messages whole and streamed, tools and their results, structured output, token counts, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from conftest import MAX_JSON_TOKENS, MAX_TOKENS, Finding


@pytest.fixture(scope="module")
def base(url: str) -> str:
    """The address without `/v1`, which the client adds."""
    return url.removesuffix("/v1")


@pytest.fixture(scope="module")
def client(base: str) -> Any:
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=120) as one:
        yield one


@pytest.fixture
def look(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


def extra(**fields: Any) -> dict[str, Any]:
    """Fields that the client has no arguments for."""
    return {"extra_body": {"seed": 1, **fields}}


def test_models(client: Any) -> None:
    (card,) = client.models.list().data
    assert (card.type, card.display_name) == ("model", card.id)
    assert client.models.retrieve(card.id).created_at == card.created_at


def test_a_message(client: Any, question: Any) -> None:
    reply = client.messages.create(
        model="demo", messages=question, max_tokens=MAX_TOKENS, system="Be short.", **extra()
    )
    assert reply.id.startswith("msg_")
    assert reply.content[0].type == "text"
    assert reply.content[0].text
    assert reply.stop_reason in ("end_turn", "max_tokens")
    usage = reply.usage
    counted = client.messages.count_tokens(model="demo", messages=question, system="Be short.")
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert 0 < usage.output_tokens <= MAX_TOKENS
    assert reply._request_id


def test_streaming_says_the_same(client: Any, question: Any) -> None:
    asked = {"model": "demo", "messages": question, "max_tokens": 64, **extra(temperature=0)}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        told = stream.get_final_message()
    assert told.content[0].text == text == whole.content[0].text
    assert (told.stop_reason, told.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_raw_events(client: Any, question: Any) -> None:
    with client.messages.create(
        model="demo", messages=question, max_tokens=8, stream=True, **extra()
    ) as stream:
        kinds = [one.type for one in stream]
    assert (kinds[:2], kinds[-3:]) == (
        ["message_start", "content_block_start"],
        ["content_block_stop", "message_delta", "message_stop"],
    )
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_stop_sequences(client: Any, question: Any) -> None:
    whole = client.messages.create(model="demo", messages=question, max_tokens=64, **extra(temperature=0))
    word = whole.content[0].text[8:12]
    cut = client.messages.create(
        model="demo", messages=question, max_tokens=64, stop_sequences=[word], **extra(temperature=0)
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert cut.content[0].text == whole.content[0].text.partition(word)[0]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_tools(client: Any, question: Any, look: Any, choice: Any) -> None:
    one_call = {**choice, "disable_parallel_tool_use": True}
    asked = {"model": "demo", "tools": [look], "max_tokens": MAX_JSON_TOKENS, **extra(temperature=0)}
    reply = client.messages.create(messages=question, tool_choice=one_call, **asked)
    (call,) = [block for block in reply.content if block.type == "tool_use"]
    assert (reply.stop_reason, call.name) == ("tool_use", "look")
    Finding.model_validate(call.input)
    with client.messages.stream(messages=question, tool_choice=one_call, **asked) as stream:
        same = stream.get_final_message()
    assert [block.input for block in same.content if block.type == "tool_use"] == [call.input]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "found"}
    answered = [
        *question,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    after = client.messages.create(messages=answered, **{**asked, "max_tokens": MAX_TOKENS})
    assert after.stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_json_of_a_schema(client: Any, question: Any) -> None:
    reply = client.messages.parse(
        model="demo", messages=question, max_tokens=MAX_JSON_TOKENS, output_format=Finding, **extra()
    )
    assert isinstance(reply.parsed_output, Finding)


def test_a_begun_reply_goes_on(client: Any, question: Any) -> None:
    begun = [*question, {"role": "assistant", "content": '"""Add'}]
    reply = client.messages.create(model="demo", messages=begun, max_tokens=8, **extra(temperature=0))
    assert not reply.content[0].text.startswith('"""Add')


def test_errors(client: Any, base: str, question: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="demo", messages=question, max_tokens=8, **extra(temperature=-1))
    error = caught.value.body["error"]
    assert (error["type"], error["message"].partition(":")[0]) == ("invalid_request_error", "temperature")
    assert caught.value.request_id
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0\.source: .*sees no images"):
        client.messages.create(model="demo", messages=[{"role": "user", "content": [image]}], max_tokens=8)


def test_many_at_once(base: str, question: Any) -> None:
    async def ask() -> list[Any]:
        async with anthropic.AsyncAnthropic(
            base_url=base, api_key="none", max_retries=0, timeout=120
        ) as client:
            asked = {"model": "demo", "messages": question, "max_tokens": 8, **extra()}
            return await asyncio.gather(*(client.messages.create(**asked) for _ in range(12)))

    replies = asyncio.run(ask())
    assert len({reply.content[0].text for reply in replies}) == 1
