"""`/v1/completions` beyond plain prompts: the prompt told back, text before and after, the endpoint's four prompts."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from slipstream.engine.api import Infill
from slipstream.engine.errors import Unsupported
from tests.http.serving import Served

PATH = "/v1/completions"


def refused(server: Served, **fields: Any) -> tuple[str, str]:
    answer = server.post(PATH, {"prompt": "a", **fields})
    assert answer.status_code == 400, answer.text
    assert not server.engine.requests
    return answer.json()["error"]["param"], answer.json()["error"]["code"]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a b", ["a b"]),
        (["a", "b c"], ["a", "b c"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        (["a", [3, 4]], ["a", (3, 4)]),
    ],
)
def test_forms_of_a_prompt(server: Served, prompt: Any, wanted: list[Any]) -> None:
    body = server.post(PATH, {"prompt": prompt, "n": 2, "seed": 5}).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(wanted)))
    assert [one.prompt for one in server.engine.requests] == [one for one in wanted for _ in range(2)]
    assert [one.sampling.seed for one in server.engine.requests] == [5, 6] * len(wanted)


def test_the_prompt_is_told_back(client: OpenAI, server: Served) -> None:
    reply = client.completions.create(model="m", prompt=[5, 6, 7], echo=True, max_tokens=2, n=2)
    assert [choice.text for choice in reply.choices] == ["p0 p1 p2 w0 w1 "] * 2
    assert [choice.logprobs for choice in reply.choices] == [None, None]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 4), "an echo is not generated"
    stream = client.completions.create(model="m", prompt=[5, 6, 7], echo=True, max_tokens=2, stream=True)
    assert [chunk.choices[0].text for chunk in stream] == ["p0 p1 p2 ", "w0 w1 ", ""]
    client.completions.create(model="m", prompt="a", echo=False)
    assert [one.echo for one in server.engine.requests] == [True, True, True, False]


def test_an_echo_counts_no_tokens_on_the_way(server: Served) -> None:
    chunks = server.events(PATH, prompt=[5, 6], echo=True, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 3, 6, 9, 10, 10]


def test_text_before_and_after(client: OpenAI, server: Served) -> None:
    client.completions.create(model="m", prompt=["def f(", "def g("], suffix="return x")
    assert [one.prompt for one in server.engine.requests] == [
        Infill("def f(", "return x"),
        Infill("def g(", "return x"),
    ]
    for nothing in (None, ""):
        assert server.post(PATH, {"prompt": "a", "suffix": nothing}).status_code == 200
        assert server.engine.requests[-1].prompt == "a"


def test_suffixes_that_cannot_be(client: OpenAI, server: Served) -> None:
    assert refused(server, suffix="x", prompt=[1, 2]) == ("suffix", "invalid_value")
    assert refused(server, suffix="x", prompt=["a", [1]]) == ("suffix", "invalid_value")
    assert refused(server, suffix="x", echo=True) == ("suffix", "invalid_value")
    assert refused(server, suffix=["x"]) == ("suffix", "invalid_value")
    server.engine.refusal = Unsupported("suffix", "this model has no fill-in-the-middle tokens")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="a", suffix="b")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_value")


def test_best_of(client: OpenAI, server: Served) -> None:
    assert len(client.completions.create(model="m", prompt="a", best_of=1).choices) == 1
    server.engine.requests.clear()
    assert refused(server, best_of=2, n=2) == ("best_of", "unsupported_value")


def test_a_chat_has_no_echo_or_suffix(server: Served) -> None:
    """They are unknown there, and change nothing."""
    assert server.chat(echo=True, suffix="x").status_code == 200
    assert not server.engine.requests[-1].echo


def test_token_ids_stand_on_the_choices(server: Served) -> None:
    fields = {"prompt": [[5, 6], [7]], "max_tokens": 4, "return_token_ids": True}
    body = server.post(PATH, fields).json()
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[5, 6], [7]]
    assert [choice["token_ids"] for choice in body["choices"]] == [[0, 1, 2, 3]] * 2
    assert "prompt_token_ids" not in body
    ids: dict[int, list[int]] = {0: [], 1: []}
    prompts: dict[int, list[list[int]]] = {0: [], 1: []}
    for chunk in server.events(PATH, echo=True, **fields):
        choice = chunk["choices"][0]
        ids[choice["index"]] += choice.get("token_ids", [])
        prompts[choice["index"]] += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert ids == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert prompts == {0: [[5, 6]], 1: [[7]]}, "once, with the choice's first chunk"
