"""What goes over the wire, byte for byte: streams, whole replies, figures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from slipstream.engine.api import Chat, Delta, Speculation, Timings, Usage
from slipstream.engine.stats import DrafterCount
from tests.http.fake import counted, delta, done
from tests.http.serving import Served, chat, raw, served


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
        "types": ["prediction", "draft-model", "ngram-simple"],
        "n_max": 4,
        "n_min": 0,
        "p_min": 0.0,
    }


def ends(server: Served, *speculations: Speculation | None, **timing: float) -> dict[str, Any]:
    """The body of a chat whose choices end with the given figures."""
    spent = {"queue_s": 0.5, "prompt_s": 2.0, "generation_s": 4.0, "draft_s": 0.5, "verify_s": 3.0}
    times = Timings(**{**spent, **timing})
    runs = iter(speculations)

    def script(request: Any) -> list[Any]:
        end = done(request, 9, usage=Usage(100, 60, 9), timings=times)
        run = next(runs)
        return [delta("x"), replace(end, speculation=run) if run else end]

    server.engine.script = script
    return server.chat(n=len(speculations)).json()


COUNT = DrafterCount(
    n_drafts=4,
    n_drafts_accepted=2,
    n_drafted=8,
    n_accepted=4,
    drafted_by_position=(4, 2, 1, 1),
    accepted_by_position=(2, 1, 1),
    n_begin_calls=1,
    n_draft_calls=5,
    n_accept_calls=6,
    begin_s=0.25,
    draft_s=0.005,
    accept_s=0.0000125,
)
RUN = Speculation(("ngram-simple",), 3, 0, 0.5, 5, (3, 1, 0, 1), {"ngram-simple": COUNT})


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
        "predicted_parts_ms": {"draft": 500.0, "verify": 3000.0, "host": 500.0},
        "draft_n": 8,
        "draft_n_accepted": 4,
        "drafters": {
            "ngram-simple": {
                "draft_n": 8,
                "draft_n_accepted": 4,
                "n_drafts": 4,
                "n_drafts_accepted": 2,
                "draft_n_per_position": [4, 2, 1, 1],
                "draft_n_accepted_per_position": [2, 1, 1, 0],
                "acceptance_rate_per_position": [0.5, 0.25, 0.25],
                "calls": {"begin": 1, "draft": 5, "accept": 6},
                "ms": {"begin": 250.0, "draft": 5.0, "accept": 0.013},
            }
        },
    }


def test_a_drafter_without_a_guess_tells_its_times(server: Served) -> None:
    idle = replace(COUNT, n_drafts=0, n_drafts_accepted=0, n_drafted=0, n_accepted=0, accepted_by_position=())
    timings = ends(server, replace(RUN, histogram=(5, 0, 0, 0), drafters={"suffix": idle}))["timings"]
    assert "draft_n" not in timings
    assert timings["drafters"]["suffix"]["acceptance_rate_per_position"] == []
    assert timings["drafters"]["suffix"]["calls"] == {"begin": 1, "draft": 5, "accept": 6}


def test_timings_are_always_finite(server: Served) -> None:
    body = ends(
        server,
        replace(RUN, n_steps=0, histogram=(0,), n_max=0, types=(), drafters={}),
        prompt_s=0.0,
        generation_s=0.0,
        draft_s=0.0,
        verify_s=0.0,
    )
    assert body["timings"]["predicted_parts_ms"] == {"draft": 0.0, "verify": 0.0, "host": 0.0}
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
            "acceptance_histogram": [3, 1, 0, 1],
            "num_spec_steps": 5,
            "num_accepted_draft_tokens": 4,
            "num_draft_tokens": 8,
            "num_accepted_tokens_per_pos": [2, 1, 1, 0],
            "num_draft_tokens_per_pos": [4, 2, 1, 1],
            "num_spec_tokens": 3,
        },
    }


def test_choices_add_up(server: Served) -> None:
    more = replace(COUNT, drafted_by_position=(4, 2, 2), accepted_by_position=(1, 1, 1))
    other = Speculation(
        *(("draft-model", "ngram-simple"), 1, 0, 0.5, 6, (4, 2)),
        {"draft-model": counted(3, 2), "ngram-simple": more},
    )
    body = ends(server, RUN, other)
    assert body["usage"]["prompt_tokens"] == 100
    assert body["usage"]["completion_tokens"] == 18
    figures = body["metrics"]["speculative_decoding"]
    assert figures["acceptance_histogram"] == [7, 3, 0, 1]
    assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] == 11
    assert body["timings"]["draft_n"] == 8 + 8 + 6
    drafters = body["timings"]["drafters"]
    assert (drafters["draft-model"]["draft_n"], drafters["draft-model"]["draft_n_accepted"]) == (6, 2)
    both = drafters["ngram-simple"]
    assert (both["draft_n"], both["n_drafts"], both["n_drafts_accepted"]) == (16, 8, 4)
    assert both["acceptance_rate_per_position"] == [3 / 8, 2 / 8, 2 / 8]
    assert both["draft_n_per_position"] == [8, 4, 3, 1]
    assert both["draft_n_accepted_per_position"] == [3, 2, 2, 0]
    assert figures["num_draft_tokens_per_pos"] == [8 + 3, 4 + 3, 3, 1]
    assert figures["num_accepted_tokens_per_pos"] == [3 + 2, 2, 2, 0]
    assert both["calls"] == {"begin": 2, "draft": 10, "accept": 12}
    assert both["ms"] == {"begin": 500.0, "draft": 10.0, "accept": 0.025}


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
        "steps": [
            {
                "index": 0,
                "drafter": "ngram-simple",
                "drafted": [1, 2, 99],
                "drafted_pieces": ["w1 ", "w2 ", "w99 "],
                "n_accepted": 2,
                "why_not": None,
            }
        ],
    }
    assert "spec" not in detailed[0]
    whole = server.chat(spec_detail=True).json()["spec"]
    assert [one["token_ids"] for one in whole[0]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [one["steps"][0]["n_accepted"] for one in whole[0]] == [2, 2, 2, 0]
    assert [one.steps for one in server.engine.requests] == [False, True, True]
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


def test_synthetic_drafts_are_told(server: Served) -> None:
    assert "synthetic" not in server.chat().json()
    body = ends(server, RUN, replace(RUN, synthetic=True))
    assert body["synthetic"] is True
    server.engine.script = lambda request: [
        delta("x"),
        done(request, 1, speculation=replace(RUN, synthetic=True)),
    ]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *earlier, last = server.events(**options)
        assert last["synthetic"] is True
        assert not any("synthetic" in chunk for chunk in earlier)


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
        allowed_token_ids=[5, 7],
        bad_words=["ab c"],
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
        "allowed_token_ids": (5, 7),
        "bad_words": ("ab c",),
        "seed": 3,
        "ignore_eos": True,
    }
    assert {name: getattr(request.sampling, name) for name in wanted} == wanted
    assert request.stop == ("a", "b")
    assert request.max_tokens == 8
    server.chat(n_predict=-1, stop="x")
    assert server.engine.requests[-1].max_tokens is None
    assert server.engine.requests[-1].stop == ("x",)


def test_the_servers_defaults_yield_to_the_requests() -> None:
    kwargs = '{"enable_thinking": true, "style": "short"}'
    with served(n_predict=7, reasoning="off", chat_template_kwargs=kwargs) as server:
        limits: list[tuple[dict[str, Any], int | None]] = [
            ({}, 7),
            ({"max_tokens": None}, 7),
            ({"max_tokens": 3}, 3),
            ({"max_tokens": -1}, None),
            ({"max_completion_tokens": -1, "max_tokens": 5}, None),
            ({"n_predict": 4, "max_tokens": None}, 4),
        ]
        for fields, most in limits:
            server.chat(**fields)
            assert server.engine.requests[-1].max_tokens == most, fields
        server.post("/v1/completions", {"prompt": "a"})
        assert server.engine.requests[-1].max_tokens == 7
        values: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({}, {"enable_thinking": True, "style": "short"}),
            (
                {"reasoning_effort": "none"},
                {"enable_thinking": False, "style": "short", "reasoning_effort": "none"},
            ),
            (
                {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
                {"enable_thinking": True, "style": "short", "reasoning_effort": "none"},
            ),
            ({"chat_template_kwargs": {"style": "long"}}, {"enable_thinking": True, "style": "long"}),
        ]
        for fields, expected in values:
            server.chat(**fields)
            prompt = server.engine.requests[-1].prompt
            assert isinstance(prompt, Chat)
            assert prompt.template_kwargs == expected, fields
    with served(reasoning="off") as server:
        server.chat()
        prompt = server.engine.requests[-1].prompt
        assert isinstance(prompt, Chat)
        assert prompt.template_kwargs == {"enable_thinking": False}


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
    given = {"enable_thinking": False, "lang": "fr", "rules": [{"id": 1, "words": ["a", None]}, 2.5]}
    prompt = prompt_of(server, chat_template_kwargs=given)
    assert prompt.template_kwargs == given
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
