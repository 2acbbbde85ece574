"""`/completion` and `/infill` of a server on the demo pair: the text is that of plain decoding, in every form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.process import DEMO, forked

PROMPT = "<|user|>Write the docstring:\n\ndef add(a, b):\n    return a + b\n<|assistant|>"
LONG = {"prompt": PROMPT, "n_predict": 48, "ignore_eos": True, "seed": 5, "temperature": 0.8}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("native") / "log"
    with forked(log, (*DEMO, "--ctx-size", "512", "--parallel", "2", "--threads", "1")) as server:
        with httpx.Client(base_url=server.url, timeout=60) as one:
            yield one
        assert not server.surprises()


def ask(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post("/completion", json={**LONG, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_drafts_change_no_text(http: httpx.Client) -> None:
    plain = ask(http, **{"speculative.types": "none"})
    assert "draft_n" not in plain["timings"]
    for fields in ({}, {"speculative.types": "draft-model"}, {"speculative.n_max": 1}, {"id_slot": 1}):
        assert ask(http, **fields)["content"] == plain["content"]


def test_a_stream_says_the_same(http: httpx.Client) -> None:
    whole = ask(http, n_probs=2)
    answer = http.post("/completion", json={**LONG, "n_probs": 2, "stream": True, "return_progress": True})
    events = [json.loads(one.removeprefix("data: ")) for one in answer.text.split("\n\n") if one]
    assert "".join(one["content"] for one in events) == whole["content"]
    judged = [each for one in events for each in one.get("completion_probabilities", ())]
    assert [one["id"] for one in judged] == [one["id"] for one in whole["completion_probabilities"]]
    assert [one["prompt_progress"]["processed"] for one in events if "prompt_progress" in one][-1] == events[
        -1
    ]["tokens_evaluated"]


def test_a_text_is_banned_by_its_tokens(http: httpx.Client) -> None:
    asked = {"temperature": 0, "return_tokens": True}
    for token in dict.fromkeys(ask(http, **asked)["tokens"]):
        text = http.post("/detokenize", json={"tokens": [token]}).json()["content"]
        if http.post("/tokenize", json={"content": text}).json()["tokens"] == [token]:
            break
    else:
        pytest.fail("no token of the reply is a text by itself")
    for bias in ([[text, False]], {text: False}, [[token, False]]):
        assert token not in ask(http, **asked, logit_bias=bias)["tokens"]


def test_a_request_of_the_speculative_pull_request(http: httpx.Client) -> None:
    fields = {"top_k": 1, "samplers": ["top_k"], "cache_prompt": True, "speculative.n_max": 16}
    assert ask(http, **fields)["content"] == ask(http, temperature=0)["content"]


def test_a_model_without_tokens_for_gaps_says_so(http: httpx.Client) -> None:
    answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("input_suffix", "unsupported_value")
    assert "no tokens to fill in the middle" in error["message"]
