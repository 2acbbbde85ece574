"""The rules that break OpenAI's Python client, each tried with the real client against a real server.

The numbers are those of the conformance table the server was written against; 3 and 4 are tried in test_tools.py, 18
(embeddings) is a feature this server refuses, so its test checks the refusal.
"""

from __future__ import annotations

import asyncio
import time

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from slipstream.engine.api import Delta, Failed, TokenLogprob
from slipstream.engine.errors import Overloaded, StepFailed
from slipstream.server.http import sse
from slipstream.server.http.sse import PING_S
from tests.http.fake import delta, done, words
from tests.http.serving import Served, until

HI = [{"role": "user", "content": "Hi there"}]


def test_plain(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="m", messages=HI)
    assert reply.choices[0].message.content == "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 "
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens == 13
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 1


def test_1_role_comes_once(client: OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=HI) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].message.content == "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 "


def test_2_choices_open_in_order(client: OpenAI, server: Served) -> None:
    # The last choice has text first; its role chunk must wait for those of the others all the same.
    server.engine.script = lambda request: [0.03 * (3 - int(request.id[-1])), delta("x"), done(request, 1)]
    with client.chat.completions.stream(model="m", messages=HI, n=3) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["x", "x", "x"]
    assert [choice.message.role for choice in final.choices] == ["assistant"] * 3


def test_5_extensions_stand_on_the_root(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model="m", messages=HI, stream=True, extra_body={"spec_detail": True})
    )
    assert chunks[1].model_extra["spec"]["sources"] == [None, "ngram-simple", "draft-model"]
    assert all(not choice.delta.model_extra for chunk in chunks for choice in chunk.choices)
    with client.chat.completions.stream(model="m", messages=HI, extra_body={"spec_detail": True}) as stream:
        assert stream.get_final_completion().choices[0].message.content.startswith("w0 w1")


def test_6_object_is_constant(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="m", messages=HI, stream=True, n=2))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for name in ("id", "created", "model", "system_fingerprint"):
        assert len({getattr(chunk, name) for chunk in chunks}) == 1


def test_7_usage_is_the_last_chunk(client: OpenAI) -> None:
    asked = {"include_usage": True}
    with client.chat.completions.stream(model="m", messages=HI, n=2, stream_options=asked) as stream:
        assert stream.get_final_completion().usage.completion_tokens == 20
    *earlier, last = client.chat.completions.create(model="m", messages=HI, stream=True, stream_options=asked)
    assert last.choices == []
    assert last.usage.completion_tokens == 10
    assert last.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == 5
    assert {chunk.usage for chunk in earlier} == {None}
    assert all("timings" not in chunk.model_extra for chunk in earlier)


def test_8_9_comments_keep_alive(client: OpenAI, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)
    server.engine.script = lambda request: words(request, delay_s=0.05)
    with client.chat.completions.stream(model="m", messages=HI) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 "
    raw = server.chat(stream=True).text
    assert ": ping\n\n" in raw
    assert all(line == "" or line.startswith(("data: ", ": ping")) for line in raw.split("\n"))


def test_10_error_after_the_first_byte(client: OpenAI, server: Served) -> None:
    server.engine.script = lambda request: [delta("x"), Failed(StepFailed("cause at 0xdeadbeef"))]
    stream = iter(client.chat.completions.create(model="m", messages=HI, stream=True))
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "x"]
    with pytest.raises(openai.APIError) as caught:
        next(stream)
    assert (caught.value.type, caught.value.code) == ("server_error", "internal_error")
    assert "deadbeef" not in caught.value.message
    assert server.events()[-1]["error"]["type"] == "server_error"


async def test_11_body_ends_after_done(server: Served) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for _ in range(2):
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
            async for chunk in stream:
                if chunk.choices[0].finish_reason:
                    ended = time.monotonic()
            assert time.monotonic() - ended < PING_S, "nothing comes behind the end, not even a ping"
            assert stream.response.is_closed
    await asyncio.sleep(0)


def test_12_13_finish_reason_is_true(client: OpenAI) -> None:
    assert client.chat.completions.create(model="m", messages=HI).choices[0].finish_reason == "stop"
    cut = client.chat.completions.create(model="m", messages=HI, max_completion_tokens=4)
    assert cut.choices[0].finish_reason == "length"
    reasons = [
        chunk.choices[0].finish_reason
        for chunk in client.chat.completions.create(model="m", messages=HI, max_tokens=4, stream=True)
    ]
    assert reasons == [None, None, None, "length"]


def test_14_log_probabilities_are_finite(client: OpenAI, server: Served) -> None:
    low = TokenLogprob(1, b"x", -1e30, (TokenLogprob(2, b"y", -0.5),))
    server.engine.script = lambda request: [Delta("x", (1,), (None,), ("x",), (low,)), done(request, 1)]
    reply = client.chat.completions.create(model="m", messages=HI, logprobs=True, top_logprobs=1)
    entry = reply.choices[0].logprobs.content[0]
    assert (entry.token, entry.logprob, entry.top_logprobs[0].logprob) == ("x", -9999.0, -0.5)


def test_15_bad_requests_name_the_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HI, temperature=-1)
    error = caught.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", "temperature", "invalid_value")


def test_16_deterministic_failures_are_not_retried(server: Served) -> None:
    server.engine.script = lambda request: [StepFailed("cause")]
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.chat.completions.create(model="m", messages=HI)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(server.engine.requests) == 1


def test_16_a_full_queue_says_when_to_retry(client: OpenAI, server: Served) -> None:
    server.engine.refusal = Overloaded("64 wait", 0.2)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="m", messages=HI)
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.code == "queue_full"


def test_17_every_answer_has_a_request_id(client: OpenAI) -> None:
    mine = {"x-request-id": "trace-1.A_b"}
    assert (
        client.chat.completions.create(model="m", messages=HI, extra_headers=mine)._request_id
        == "trace-1.A_b"
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[])
    assert caught.value.request_id.startswith("req-")


def test_18_embeddings_are_absent(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="m", input="x")
    assert caught.value.code == "not_supported"


def test_predicted_outputs(client: OpenAI) -> None:
    fields = {"model": "m", "messages": HI, "prediction": {"type": "content", "content": "w0 w1 w2 w3"}}
    reply = client.chat.completions.create(**fields)
    assert reply.usage.completion_tokens_details.accepted_prediction_tokens == 5
    assert reply.usage.completion_tokens_details.rejected_prediction_tokens == 5
    assert reply.usage.completion_tokens_details.reasoning_tokens is None  # not counted here
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        details = stream.get_final_completion().usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (5, 5)
    assert client.chat.completions.create(model="m", messages=HI).usage.completion_tokens_details is None
    fields["prediction"] = {"type": "image", "content": "x"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**fields)
    assert (caught.value.param, caught.value.code) == ("prediction.type", "unsupported_value")


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake/model"]
    assert client.models.retrieve("fake/model").owned_by == "slipstream"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions(client: OpenAI) -> None:
    reply = client.completions.create(model="m", prompt=["a b", "c"], n=2, max_tokens=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in reply.choices} == {"w0 w1 "}
    assert reply.usage.prompt_tokens == 5  # each prompt once: two words and one, and a begin token each
    assert reply.usage.completion_tokens == 8
    stream = client.completions.create(model="m", prompt=[3, 4], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 "


def test_a_reader_that_stops_cancels(client: OpenAI, server: Served) -> None:
    server.engine.script = lambda request: words(request, delay_s=0.5)
    stream = client.chat.completions.create(model="m", messages=HI, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: server.engine.streams[0].closed)
