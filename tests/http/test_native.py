"""llama-server's `/completion` and `/infill`: its fields, its objects, its streams, over the same engine requests."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest
from pydantic import TypeAdapter

from slipstream.engine.api import Delta, Infill, Request, TokenLogprob
from slipstream.engine.service.run.event_stream import _join
from slipstream.server.native.line_limits import LimitedText
from slipstream.server.native.replies import Generated
from slipstream.server.openai.formats.format import Content
from tests.http.fake import Step, delta, done
from tests.http.serving import Served

REPLY = TypeAdapter(Generated | list[Generated])
TEN = "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 "


def ask(server: Served, path: str = "/completion", **fields: Any) -> Any:
    answer = server.post(path, {"prompt": "a b", **fields} if path == "/completion" else fields)
    assert answer.status_code == 200, answer.text
    REPLY.validate_json(answer.content, extra="forbid")  # the document has any object, for `response_fields`
    return answer.json()


def chunks(server: Served, path: str = "/completion", **fields: Any) -> list[dict[str, Any]]:
    answer = server.post(path, {"prompt": "a b", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return [json.loads(one.removeprefix("data: ")) for one in answer.text.split("\n\n") if one]


def test_whole(server: Served) -> None:
    reply = ask(server, n_predict=8, seed=4)
    assert reply["content"] == "w0 w1 w2 w3 w4 w5 w6 w7 "
    assert (reply["tokens_predicted"], reply["tokens_evaluated"], reply["tokens_cached"]) == (8, 3, 11)
    assert (reply["stop"], reply["stop_type"], reply["stopping_word"]) == (True, "limit", "")
    assert (reply["prompt"], reply["truncated"], reply["has_new_line"]) == ("a b", False, False)
    assert (reply["tokens"], reply["index"], reply["id_slot"]) == ([], 0, 0)
    settings = reply["generation_settings"]
    assert (settings["seed"], settings["n_predict"], settings["temperature"]) == (4, 8, 1.0)
    assert settings["speculative.types"] == "prediction,draft-model,ngram-simple"
    assert reply["timings"]["draft_n"] > 0


def test_a_stream_ends_with_an_object_without_text(server: Served) -> None:
    *pieces, last = chunks(server)
    assert "".join(one["content"] for one in pieces) == TEN
    assert [one["tokens_predicted"] for one in pieces] == [3, 6, 9, 10]
    assert [token for one in pieces for token in one["tokens"]] == list(range(10))
    assert {one["stop"] for one in pieces} == {False}
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "eos")
    whole = ask(server)
    for name in ("tokens_predicted", "tokens_evaluated", "tokens_cached", "has_new_line", "prompt"):
        assert last[name] == whole[name]


def test_stop_words(server: Served) -> None:
    server.engine.script = lambda request: [delta("one"), done(request, 1, stop_string="two")]
    reply = ask(server, stop=["two"])
    assert (reply["stop_type"], reply["stopping_word"]) == ("word", "two")


def test_prompts_in_every_form(server: Served) -> None:
    for prompt, ids in (
        ([5, 6], [5, 6]),
        (["a b", 7, "c"], [1, 101, 101, 7, 101]),
        ([7, "a"], [7, 101]),
    ):
        assert ask(server, prompt=prompt)["tokens_evaluated"] == len(ids)
        assert server.engine.requests[-1].prompt == tuple(prompt)
    assert ask(server, prompt={"prompt_string": "a b"})["prompt"] == "a b"
    several = ask(server, prompt=["a", "b c", [7, "d"]])
    assert [one["index"] for one in several] == [0, 1, 2]
    assert [one["prompt"] for one in several[:2]] == ["a", "b c"]
    assert [one["index"] for one in ask(server, n_cmpl=2)] == [0, 1]


def test_samplers_that_are_not_named_are_off(server: Served) -> None:
    asked = {"temperature": 0.1, "top_k": 1, "top_p": 0.5, "min_p": 0.1, "frequency_penalty": 1}
    ask(server, **asked, samplers=["dry", "top_k", "typ_p", "infill"])
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 1, 1.0, 0.0)
    assert (sampling.frequency_penalty, sampling.repeat_penalty) == (0.0, 1.0)
    ask(server, **asked, samplers="ekpmt")
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.frequency_penalty) == (0.1, 0.5, 1)


def test_the_request_of_the_speculative_pull_request_runs(server: Served) -> None:
    ask(server, top_k=1, samplers=["top_k"], cache_prompt=True, **{"speculative.n_max": 16})
    request = server.engine.requests[-1]
    assert (request.sampling.top_k, request.sampling.temperature) == (1, 1.0)
    assert request.speculate.n_max == 16


def test_biases_by_token_and_by_text(server: Served) -> None:
    for given in ([[5, 1.5], ["ab", False], ["7", -3]], {"5": 1.5, "ab": False, "7": -3}):
        ask(server, logit_bias=given)
        assert server.engine.requests[-1].sampling.logit_bias == ((5, 1.5), ("ab", -math.inf), (7, -3.0))
    reply = ask(server, logit_bias=[["ab", False]])
    assert reply["generation_settings"]["logit_bias"] == [{"token": "ab", "bias": False}]


def test_a_slot_of_ones_own(server: Served) -> None:
    for asked, slot in ((-1, None), (2, 2), (6, 2), (None, None)):
        ask(server, id_slot=asked)
        assert server.engine.requests[-1].slot == slot
    ask(server, id_slot=1, n_cmpl=3)
    assert [one.slot for one in server.engine.requests[-3:]] == [1, None, None]


def test_progress_and_times(server: Served) -> None:
    streamed = chunks(server, prompt="a b c d", return_progress=True, timings_per_token=True, id_slot=2)
    far = [one["prompt_progress"] for one in streamed if "prompt_progress" in one]
    assert [(one["total"], one["cache"], one["processed"]) for one in far] == [
        (5, 1, 1),
        (5, 1, 3),
        (5, 1, 5),
    ]
    times = [one["timings"] for one in streamed if one["content"]]
    assert [(one["cache_n"], one["prompt_n"], one["predicted_n"]) for one in times] == [
        (1, 4, 3),
        (1, 4, 6),
        (1, 4, 9),
        (1, 4, 10),
    ]
    assert {one["id_slot"] for one in streamed[:-1]} == {2}
    assert not any("prompt_progress" in one or "timings" in one for one in chunks(server)[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_progress_and_times_of_openais_streams(server: Served, path: str) -> None:
    asked = server.events(path, return_progress=True, timings_per_token=True)
    far = [one["prompt_progress"]["processed"] for one in asked if "prompt_progress" in one]
    assert far == [1, 2, 3]
    assert all(one["choices"] for one in asked)
    assert [one["timings"]["predicted_n"] for one in asked if "timings" in one] == [0, 0, 0, 3, 6, 9, 10, 10]
    first = next(one["timings"] for one in asked if "timings" in one)
    assert (first["cache_n"], first["prompt_n"], first["predicted_ms"]) == (1, 0, 0.0)
    times = server.events(path, timings_per_token=True)
    assert not any("prompt_progress" in one for one in times)


def test_log_probabilities(server: Served) -> None:
    reply = ask(server, n_probs=2, n_predict=4)
    judged = reply["completion_probabilities"]
    assert [one["id"] for one in judged] == [0, 1, 2, 3]
    assert "".join(one["token"] for one in judged) == reply["content"]
    assert [len(one["top_logprobs"]) for one in judged] == [2] * 4
    *pieces, last = chunks(server, n_probs=2, n_predict=4)
    assert [one for piece in pieces for one in piece["completion_probabilities"]] == judged
    assert "completion_probabilities" not in last


def test_chosen_fields(server: Served) -> None:
    paths = ["content", "generation_settings/n_predict", "timings/prompt_n", "nothing", "content/x"]
    answer = server.http.post("/completion", json={"prompt": "a b", "n_predict": 4, "response_fields": paths})
    assert answer.json() == {
        "content": "w0 w1 w2 w3 ",
        "generation_settings/n_predict": 4,
        "timings/prompt_n": 2,
    }
    assert ask(server, return_tokens=True)["tokens"] == list(range(10))


def test_failures_are_objects_of_a_stream(server: Served) -> None:
    server.engine.script = lambda request: [delta("x")]
    *_, last = chunks(server)
    assert last["error"]["code"] == "internal_error"


# What the editors' plugins llama.vim and Continue send.
VIM = {
    "id_slot": 0,
    "input_suffix": "\n    return total\n",
    "input_prefix": "def add(numbers):\n    total = 0\n",
    "input_extra": [{"text": "x = 1\n", "time": 1, "filename": "a.py"}],
    "prompt": "    for",
    "n_predict": 128,
    "stop": ["\n\n\n\n"],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"],
}
CONTINUE = {
    "input_prefix": "def add(a, b):\n    ",
    "input_suffix": "\n",
    "n_predict": 64,
    "temperature": 0.01,
    "stop": ["<|fim_prefix|>", "<|endoftext|>"],
    "stream": True,
}


def test_requests_of_editors(server: Served) -> None:
    answer = server.http.post("/infill", json=VIM).json()
    assert answer["content"] == TEN
    assert set(answer) == set(VIM["response_fields"])
    request = server.engine.requests[-1]
    prefix = "def add(numbers):\n    total = 0\n    for"
    assert request.prompt == Infill(prefix, "\n    return total\n", (("a.py", "x = 1\n"),))
    assert (request.slot, request.max_tokens, request.sampling.temperature) == (0, 128, 1.0)
    streamed = server.post("/infill", CONTINUE)
    assert streamed.text.count('"stop":true') == 1


LINES = "first\n    more\n\tmuch\nback\n    on\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("n_indent", "kept"),
    [
        (0, LINES),
        (1, "first\n    more\n\tmuch\n"),
        (2, "first\n    more\n"),
        (4, "first\n    more\n"),
        (5, "first\n"),
    ],
)
def test_a_line_that_is_indented_less_ends_the_text(size: int, n_indent: int, kept: str) -> None:
    text = LimitedText(n_indent)
    assert said(text, LINES, size) == kept
    assert text.is_ended == (kept != LINES)


def said(text: LimitedText, whole: str, size: int) -> str:
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    made = [one for piece in pieces if not text.is_ended for one in text.feed(Delta(piece, (1,), (None,)))]
    return "".join(one.text for one in (*made, *text.finish()) if isinstance(one, Content))


def test_white_space_at_the_end_is_not_lost() -> None:
    assert said(LimitedText(4), "first\n  ", 3) == "first\n  "


def test_time_is_up_at_a_line_break() -> None:
    clock = iter([0.0, 0.1, 0.2, 5.0, 5.1])
    text = LimitedText(seconds=1.0, now=lambda: next(clock))
    assert said(text, "one\ntwo\nthree\nfour\n", 4) == "one\ntwo\nthree\n"
    assert text.is_ended


def test_a_limited_text_ends_the_generation(server: Served) -> None:
    server.engine.script = lambda request: [
        delta("a\n"),
        delta("b\n"),
        delta("c\n"),
        delta("d"),
        done(request, 4),
    ]
    reply = ask(server, n_indent=2)
    assert (reply["content"], reply["stop_type"]) == ("a\n", "limit")
    assert server.engine.streams[-1].asked_to_finish


@pytest.mark.parametrize("n_burst", [2, 3, 20])
def test_tokens_behind_the_end_are_not_sent_however_many_come_at_once(server: Served, n_burst: int) -> None:
    fields = {"n_indent": 2, "n_probs": 1, "return_tokens": True}
    server.engine.script = judged(LINES, 1)
    alone = ask(server, **fields)
    assert (alone["content"], len(alone["tokens"])) == ("first\n    more\n", 10)
    server.engine.script = judged(LINES, n_burst)
    together = ask(server, **fields)
    pieces = chunks(server, **fields)
    for name, whole in (("tokens", together["tokens"]), ("completion_probabilities", None)):
        streamed = [each for one in pieces for each in one.get(name, ())]
        assert streamed == (whole or together[name]) == alone[name]


def judged(text: str, n_burst: int) -> Callable[[Request], Iterator[Step]]:
    """A script that says the text in bursts of tokens of two characters, each with its log-probability.

    Every other token's text is held back, and comes with the next.
    """

    def script(request: Request) -> Iterator[Step]:
        tokens = [
            TokenLogprob(i, text[at : at + 2].encode(), -1.0, (), at)
            for i, at in enumerate(range(0, len(text), 2))
        ]
        pieces = [text[2 * i - 2 : 2 * i + 2] if i % 2 else "" for i in range(len(tokens))]
        steps = [
            Delta(piece, (i,), (None,), (piece,), tuple(tokens[i - 1 : i + 1] if i % 2 else ()))
            for i, piece in enumerate(pieces)
        ]
        for i in range(0, len(steps), n_burst):
            yield reduce(_join, steps[i : i + n_burst])
        yield done(request, len(tokens))

    return script


def test_a_prompt_that_is_too_long_has_its_name(server: Served) -> None:
    for prompt in ("a " * 600, [7] * 600):
        error = server.post("/completion", {"prompt": prompt}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_the_samplers_in_force_are_shown(server: Served) -> None:
    assert ask(server, samplers=["top_k"])["generation_settings"]["samplers"] == ["top_k"]
    assert len(ask(server)["generation_settings"]["samplers"]) == 5
