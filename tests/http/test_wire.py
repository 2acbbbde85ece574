"""What goes over the wire, byte for byte: streams, whole replies, figures, speculation keys."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from engine.api import Chat, Delta, DrafterCount, Speculation, Timings, Usage
from tests.http.fake import delta, done
from tests.http.serving import Served, chat, raw


def dechunked(body: bytes) -> bytes:
    """The content of a chunked body, which must be closed by the empty chunk."""
    content = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        content, body = content + rest[:length], rest[length + 2 :]
        if length == 0:
            assert body == b""
            return content
    raise AssertionError("the last chunk is missing")


def raw_stream(server: Served, **fields: Any) -> tuple[list[str], str]:
    """Header lines and content of a stream as bytes; the reply's own id and time replaced by 1."""
    body = json.dumps(chat(stream=True, **fields)).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"connection: close\r\nx-request-id: abc\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    answer, _, chunked = raw(server.port, head + body).partition(b"\r\n\r\n")
    text = re.sub(r"chatcmpl-[0-9a-f]{32}", "chatcmpl-1", dechunked(chunked).decode())
    return answer.decode().lower().split("\r\n"), re.sub(r'"created":\d+', '"created":1', text)


def test_the_bytes_of_a_stream(server: Served) -> None:
    server.engine.script = lambda request: [
        delta("Hé", None, "ngram-simple"),
        delta("!"),
        done(request, 3, seed=5, stop_string="\n"),
    ]
    lines, text = raw_stream(server, stream_options={"include_usage": True})
    assert lines[0] == "http/1.1 200 ok"
    assert {
        "content-type: text/event-stream; charset=utf-8",
        "cache-control: no-cache",
        "x-accel-buffering: no",
        "x-request-id: abc",
    } <= set(lines)
    start = (
        'data: {"id":"chatcmpl-1","created":1,"model":"fake/model","system_fingerprint":"fake-1",'
        '"object":"chat.completion.chunk","choices":['
    )
    *chunks, figures, last, nothing = text.split("\n\n")
    assert [chunk.removeprefix(start).removesuffix('],"usage":null}') for chunk in chunks] == [
        '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{"content":"Hé"},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{"content":"!"},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":"\\n"}',
    ]
    assert (last, nothing) == ("data: [DONE]", "")
    assert figures.startswith(start + '],"usage":{"prompt_tokens":3,"completion_tokens":3,"total_tokens":6')
    told = json.loads(figures.removeprefix("data: "))
    assert (told["choices"], told["seed"]) == ([], 5)
    assert told["speculative"] == {
        "types": ["draft-model", "ngram-simple"],
        "n_max": 4,
        "n_min": 0,
        "p_min": 0.0,
    }


def ends(server: Served, *speculations: Speculation | None, **timing: float) -> dict[str, Any]:
    """The body of a chat whose choices end with the given figures."""
    times = Timings(**{"queue_s": 0.5, "prompt_s": 2.0, "generation_s": 4.0, **timing})
    runs = iter(speculations)

    def script(request: Any) -> list[Any]:
        end = done(request, 9, usage=Usage(100, 60, 9), timings=times)
        run = next(runs)
        return [delta("x"), replace(end, speculation=run) if run else end]

    server.engine.script = script
    return server.chat(n=len(speculations)).json()


RUN = Speculation(("ngram-simple",), 3, 0, 0.5, 5, (3, 0, 1, 1), {"ngram-simple": DrafterCount(8, 4)})


def test_timings_are_those_of_llama_server(server: Served) -> None:
    assert ends(server, RUN)["timings"] == {
        "cache_n": 60,
        "prompt_n": 40,
        "prompt_ms": 2000.0,
        "prompt_per_token_ms": 50.0,
        "prompt_per_second": 20.0,
        "predicted_n": 9,
        "predicted_ms": 4000.0,
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
        "draft_n": 8,
        "draft_n_accepted": 4,
        "drafters": {"ngram-simple": {"draft_n": 8, "draft_n_accepted": 4}},
    }


def test_timings_are_always_finite(server: Served) -> None:
    body = ends(
        server,
        replace(RUN, n_steps=0, histogram=(0,), n_max=0, types=(), drafters={}),
        prompt_s=0.0,
        generation_s=0.0,
    )
    assert body["timings"]["predicted_per_second"] == body["timings"]["prompt_per_second"] == 0.0
    assert "draft_n" not in body["timings"]
    assert "speculative_decoding" not in body["metrics"]


def test_speculation_metrics_are_those_of_vllm(server: Served) -> None:
    assert ends(server, RUN)["metrics"] == {
        "time_to_first_token_ms": 2500.0,
        "generation_time_ms": 4000.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.0,
        "speculative_decoding": {
            "mean_acceptance_length": 1.8,
            "draft_acceptance_rate": 0.5,
            "acceptance_histogram": [3, 0, 1, 1],
            "num_spec_steps": 5,
            "num_accepted_draft_tokens": 4,
            "num_draft_tokens": 8,
            "num_spec_tokens": 3,
        },
    }


def test_choices_add_up(server: Served) -> None:
    other = Speculation(("draft-model",), 1, 0, 0.5, 6, (4, 2), {"draft-model": DrafterCount(6, 2)})
    body = ends(server, RUN, other)
    assert body["usage"]["prompt_tokens"] == 100
    assert body["usage"]["completion_tokens"] == 18
    figures = body["metrics"]["speculative_decoding"]
    assert figures["acceptance_histogram"] == [7, 2, 1, 1]
    assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] == 11
    assert body["timings"]["draft_n"] == 14
    assert body["timings"]["drafters"]["draft-model"] == {"draft_n": 6, "draft_n_accepted": 2}


def test_figures_ride_on_the_finish_chunk_without_usage(server: Served) -> None:
    *earlier, last = server.events(n=2)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert {"timings", "metrics", "speculative", "seed"} <= set(last)
    assert not any("timings" in chunk or "usage" in chunk for chunk in earlier)


def test_continuous_usage(server: Served) -> None:
    chunks = server.events(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 3, 6, 9, 10, 10, 10]
    chunks = server.events(n=2, stream_options={"continuous_usage_stats": True})
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}  # the prompt counts once


def test_detail_only_when_asked(server: Served) -> None:
    assert not any("spec" in chunk for chunk in server.events())
    detailed = server.events(spec_detail=True)
    assert detailed[1]["spec"] == {
        "sources": [None, "ngram-simple", "draft-model"],
        "token_ids": [0, 1, 2],
        "pieces": ["w0 ", "w1 ", "w2 "],
    }
    assert "spec" not in detailed[0]
    whole = server.chat(spec_detail=True).json()["spec"]
    assert [one["token_ids"] for one in whole[0]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    server.engine.script = lambda request: [Delta("ab", (1, 2), (None, None)), done(request, 2)]
    assert "pieces" not in server.events(spec_detail=True)[1]["spec"]


def test_text_streams(server: Served) -> None:
    chunks = server.events("/v1/completions", prompt=["a", "b"], max_tokens=3)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "w0 w1 w2 ", 1: "w0 w1 w2 "}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("length") == 2


@pytest.mark.parametrize(
    ("fields", "types", "n_max", "n_min", "p_min"),
    [
        ({}, None, None, None, None),
        ({"speculative.n_max": 2, "speculative.n_min": 1, "speculative.p_min": 0.5}, None, 2, 1, 0.5),
        ({"speculative": {"n_max": 2}, "speculative.p_min": 1}, None, 2, None, 1.0),
        (
            {"speculative.types": "ngram-simple, draft-model"},
            ("ngram-simple", "draft-model"),
            None,
            None,
            None,
        ),
        ({"speculative": {"types": ["ngram-simple"]}}, ("ngram-simple",), None, None, None),
        ({"speculative.types": "none"}, (), None, None, None),
        ({"speculative.types": "auto"}, None, None, None, None),
        ({"speculative": None, "speculative.n_max": 0}, None, 0, None, None),
        ({"speculative": {"n_max": None}}, None, None, None, None),
    ],
)
def test_speculation_keys(
    server: Served, fields: dict[str, Any], types: Any, n_max: Any, n_min: Any, p_min: Any
) -> None:
    assert server.chat(**fields).status_code == 200
    asked = server.engine.requests[-1].speculate
    assert (asked.types, asked.n_max, asked.n_min, asked.p_min) == (types, n_max, n_min, p_min)


def test_n_max_above_the_servers_is_lowered_and_told(server: Served) -> None:
    assert server.chat(**{"speculative.n_max": 1000}).json()["speculative"]["n_max"] == 4


def test_seeds_count_up(server: Served) -> None:
    server.chat(n=3, seed=2**64 - 2)
    assert [one.sampling.seed for one in server.engine.requests] == [2**64 - 2, 2**64 - 1, 0]
    assert server.chat(seed=11).json()["seed"] == 11
    drawn = [server.chat(seed=seed).json()["seed"] for seed in (None, -1)]
    assert drawn[0] != drawn[1]
    assert all(0 <= one < 2**53 for one in drawn)


def test_fields_reach_the_engine(server: Served) -> None:
    server.chat(
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        repeat_last_n=32,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100, "6": 1.5},
        seed=3,
        ignore_eos=True,
        stop=["a", "b"],
        max_tokens=7,
        max_completion_tokens=8,
        n_predict=9,
    )
    request = server.engine.requests[-1]
    wanted = {
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "repeat_last_n": 32,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": ((5, -100.0), (6, 1.5)),
        "seed": 3,
        "ignore_eos": True,
    }
    assert {name: getattr(request.sampling, name) for name in wanted} == wanted
    assert request.stop == ("a", "b")
    assert request.max_tokens == 8
    server.chat(n_predict=-1, stop="x")
    assert server.engine.requests[-1].max_tokens is None
    assert server.engine.requests[-1].stop == ("x",)


def test_null_is_absent(server: Served) -> None:
    names = [
        *(
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "n",
            "max_tokens",
            "stop",
            "seed",
            "logit_bias",
            "stream",
        ),
        *("stream_options", "speculative", "tools", "tool_choice", "response_format", "logprobs", "user"),
        *("chat_template_kwargs", "model", "ignore_eos"),
    ]
    assert server.chat(**dict.fromkeys(names)).status_code == 200


def prompt_of(server: Served, **fields: Any) -> Chat:
    assert server.chat(**fields).status_code == 200
    prompt = server.engine.requests[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


def test_messages(server: Served) -> None:
    prompt = prompt_of(
        server,
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "name": "Al",
            },
            {"role": "assistant", "content": "c", "reasoning": "d", "tool_calls": [], "refusal": None},
        ],
        continue_final_message=True,
    )
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},  # the fake's template knows no developer
        {"role": "user", "content": "a\nb", "name": "Al"},
        {"role": "assistant", "content": "c", "reasoning_content": "d"},
    ]
    assert prompt.continue_final_message
    assert not prompt.add_generation_prompt


def test_template_arguments(server: Served) -> None:
    prompt = prompt_of(server, chat_template_kwargs={"enable_thinking": False, "lang": "fr"})
    assert prompt.template_kwargs == {"enable_thinking": False, "lang": "fr"}
    assert prompt.add_generation_prompt
    assert prompt_of(server, reasoning_effort="none").template_kwargs == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    assert not prompt_of(server, add_generation_prompt=False).add_generation_prompt


def test_prompt_cache_is_salted(server: Served) -> None:
    server.chat(cache_salt="s")
    server.chat(cache_prompt=False)
    server.chat(cache_prompt=False)
    salts = [one.tenant for one in server.engine.requests]
    assert salts[0] == ":s"
    assert len(set(salts)) == 3
