"""Log-probabilities on the wire: of chats, of plain completions, of prompts told back; whole and in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from slipstream.engine.api import Delta, Echo, Request, TokenLogprob
from tests.http.fake import done, told
from tests.http.serving import Served

HI = [{"role": "user", "content": "Hi there"}]
PATHS = ("/v1/chat/completions", "/v1/completions")


def burst(request: Request) -> list[Any]:
    """A step that writes half a character and holds it back, one without text, one that completes the character."""
    n_top = request.logprobs
    half, rest = b"\xf0\x9f", b"\x99\x82!"

    def table(*tokens: tuple[int, bytes, int]) -> tuple[TokenLogprob, ...]:
        if n_top is None:
            return ()
        return tuple(TokenLogprob(i, data, -1.0 - i, told(i, "", n_top).top, at) for i, data, at in tokens)

    return [
        Delta("ab", (1, 2), (None, "suffix"), ("ab", ""), table((1, b"ab", 0))),
        Delta("", (3,), (None,), ("",), ()),
        Delta("🙂!", (4,), (None,), ("🙂!",), table((2, half, 2), (4, rest, 2))),
        done(request, 4),
    ]


def test_a_chat_tells_every_token(client: OpenAI, server: Served) -> None:
    choice = client.chat.completions.create(
        model="m", messages=HI, max_tokens=4, logprobs=True, top_logprobs=2
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.refusal is None
    entries = choice.logprobs.content or []
    assert [entry.token for entry in entries] == ["w0 ", "w1 ", "w2 ", "w3 "]
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert [entry.bytes for entry in entries] == [list(entry.token.encode()) for entry in entries]
    assert [(top.token, top.logprob, top.bytes) for top in entries[3].top_logprobs] == [
        ("<3>", -0.5, list(b"<3>")),
        ("<4>", -1.5, list(b"<4>")),
    ]
    assert server.engine.requests[-1].logprobs == 2


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}])
def test_no_alternatives_are_an_empty_list(server: Served, fields: dict[str, Any]) -> None:
    entries = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[]] * 10
    assert server.engine.requests[-1].logprobs == 0


def test_nothing_is_told_unasked(server: Served) -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}, {"n_probs": 0}):
        assert server.chat(**fields).json()["choices"][0]["logprobs"] is None
        assert server.engine.requests[-1].logprobs is None
    for fields in ({}, {"logprobs": None}, {"logprobs": False}, {"n_probs": 0}):
        body = server.post("/v1/completions", {"prompt": "a", **fields}).json()
        assert body["choices"][0]["logprobs"] is None
        assert server.engine.requests[-1].logprobs is None


def test_a_chunk_tells_the_tokens_of_its_text(server: Served) -> None:
    chunks = server.events(logprobs=True, top_logprobs=1)
    tables = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert tables[0] is None, "the role has no token"
    assert tables[-1] is None, "the end has no token"
    assert [[entry["token"] for entry in table["content"]] for table in tables[1:-1]] == [
        ["w0 ", "w1 ", "w2 "],
        ["w3 ", "w4 ", "w5 "],
        ["w6 ", "w7 ", "w8 "],
        ["w9 "],
    ]


def test_tokens_are_held_back_with_their_text(server: Served) -> None:
    server.engine.script = burst
    chunks = [chunk["choices"][0] for chunk in server.events(logprobs=True)]
    assert [chunk["delta"].get("content") for chunk in chunks] == ["", "ab", "", "🙂!", None]
    told_bytes = [
        chunk["logprobs"] and [bytes(entry["bytes"]) for entry in chunk["logprobs"]["content"]]
        for chunk in chunks
    ]
    assert told_bytes == [None, [b"ab"], None, [b"\xf0\x9f", b"\x99\x82!"], None]
    whole = server.chat(logprobs=True).json()["choices"][0]
    assert whole["message"]["content"] == "ab🙂!"
    assert [entry["token"] for entry in whole["logprobs"]["content"]] == ["ab", "�", "��!"]


def test_the_helper_adds_them_up(client: OpenAI, server: Served) -> None:
    fields = {"model": "m", "messages": HI, "n": 3, "logprobs": True, "top_logprobs": 3, "seed": 4}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    assert len(whole.choices) == 3
    for one, other in zip(whole.choices, final.choices, strict=True):
        assert other.logprobs is not None
        assert one.logprobs is not None
        assert one.logprobs.content
        assert [entry.to_dict() for entry in one.logprobs.content] == [
            entry.to_dict() for entry in other.logprobs.content or []
        ]


def test_a_completion_tells_four_lists(client: OpenAI) -> None:
    choice = client.completions.create(model="m", prompt="a b", max_tokens=4, logprobs=2).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.to_dict() == {
        "tokens": ["w0 ", "w1 ", "w2 ", "w3 "],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [{f"<{i}>": -0.5, f"<{i + 1}>": -1.5, f"w{i} ": -0.5} for i in range(4)],
        "text_offset": [0, 3, 6, 9],
    }


def test_offsets_are_those_of_the_text(server: Served) -> None:
    server.engine.script = burst
    fields = {"prompt": "a", "logprobs": 0}
    table = server.post("/v1/completions", fields).json()["choices"][0]["logprobs"]
    assert table["tokens"] == ["ab", "bytes:\\xf0\\x9f", "bytes:\\x99\\x82!".replace("!", "\\x21")]
    assert table["text_offset"] == [0, 2, 2]
    chunks = server.events("/v1/completions", **fields)
    tables = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [one and one["text_offset"] for one in tables] == [[0], None, [2, 2], None]
    assert [one and one["tokens"] for one in tables] == [table["tokens"][:1], None, table["tokens"][1:], None]


def test_chunks_of_several_choices_keep_their_own_offsets(server: Served) -> None:
    offsets: dict[int, list[int]] = {0: [], 1: [], 2: []}
    texts = dict.fromkeys(offsets, "")
    for chunk in server.events("/v1/completions", prompt="a", n=3, logprobs=1):
        choice = chunk["choices"][0]
        offsets[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
        texts[choice["index"]] += choice["text"]
    assert offsets == {index: list(range(0, 30, 3)) for index in range(3)}
    assert all(text[3 * i :].startswith(f"w{i}") for text in texts.values() for i in range(10))


def test_the_path_of_evaluation_harnesses(server: Served) -> None:
    """Multiple choice is scored on the prompt: ids in, its log-probabilities out, one token generated."""
    body = {
        "model": "m",
        "prompt": [[5, 6, 7], [8, 9]],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "seed": 1,
    }
    choices = server.post("/v1/completions", {**body, "temperature": 0}).json()["choices"]
    assert [choice["text"] for choice in choices] == ["p0 p1 p2 w0 ", "p0 p1 w0 "]
    for choice, n_prompt in zip(choices, (3, 2), strict=True):
        table = choice["logprobs"]
        assert table["tokens"] == [f"p{i} " for i in range(n_prompt)] + ["w0 "]
        assert table["token_logprobs"] == [None] + [-0.5] * n_prompt
        assert table["top_logprobs"][0] is None
        assert all(len(one) == 2 for one in table["top_logprobs"][1:])
        assert table["text_offset"] == [3 * i for i in range(n_prompt + 1)]
        # How a harness tells whether a token was the greedy one; `<5>` and its like are the fake's likeliest.
        assert max(table["top_logprobs"][1], key=table["top_logprobs"][1].__getitem__).startswith("<")
    assert {one.echo for one in server.engine.requests} == {True}


def test_the_prompts_log_probabilities_as_vllm_has_them(server: Served) -> None:
    body = {"model": "m", "prompt": [[5, 6], [8]], "prompt_logprobs": 1, "max_tokens": 1, "n": 2}
    choices = server.post("/v1/completions", body).json()["choices"]
    token = {"logprob": -0.5, "rank": 1, "decoded_token": "p1 "}
    assert [one["prompt_logprobs"] for one in choices] == [[None, {"6": token}]] * 2 + [[None]] * 2
    assert [(one["text"], one["logprobs"]) for one in choices] == [("w0 ", None)] * 4, (
        "no echo, nothing of the reply"
    )
    assert {(one.echo, one.logprobs, one.prompt_logprobs) for one in server.engine.requests} == {
        (False, None, 1)
    }
    said = server.chat(prompt_logprobs=2, logprobs=True, max_tokens=1).json()
    *_, last = said["prompt_logprobs"]
    assert {one["rank"] for one in last.values()} == {1, 2}
    assert "prompt_logprobs" not in said["choices"][0]
    assert len(said["choices"][0]["logprobs"]["content"]) == 1
    assert "prompt_logprobs" not in server.chat(logprobs=True).json()


def test_a_prompt_may_be_judged_by_other_numbers_than_the_reply(server: Served) -> None:
    """An echo's table has as many of the likeliest tokens as the reply's, whatever `prompt_logprobs` asks for."""
    asked: dict[str, Any] = {"prompt": [5, 6], "echo": True, "max_tokens": 1}
    for n_reply, n_prompt in ((1, 3), (3, 1)):
        body = {**asked, "logprobs": n_reply, "prompt_logprobs": n_prompt}
        choice = server.post("/v1/completions", body).json()["choices"][0]
        assert choice["text"] == "p0 p1 w0 "
        assert len(choice["prompt_logprobs"][1]) == n_prompt
        assert len(choice["logprobs"]["top_logprobs"][1]) == n_reply + 1, (
            "by text: the fake's likeliest has another"
        )
        assert server.engine.requests[-1].prompt_logprobs == 3


def test_ranks_are_those_of_the_whole_vocabulary(server: Served) -> None:
    rare = TokenLogprob(9, b"x", -7.0, (TokenLogprob(2, b"y", -0.1),), rank=31)
    server.engine.script = lambda request: [
        Echo((5, 9), ("a", "x"), (None, rare)),
        Delta("x", (1,), (None,), ("x",)),
        done(request, 1),
    ]
    reply = server.post("/v1/completions", {"prompt": [5, 9], "prompt_logprobs": 1}).json()
    first, second = reply["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "9": {"logprob": -7.0, "rank": 31, "decoded_token": "x"},
        "2": {"logprob": -0.1, "rank": 1, "decoded_token": "y"},
    }


def test_an_echo_is_streamed_first(server: Served) -> None:
    chunks = server.events("/v1/completions", prompt=[5, 6], echo=True, logprobs=0, max_tokens=2)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["p0 p1 ", "w0 w1 ", ""]
    tables = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert tables[0]["token_logprobs"] == [None, -0.5]
    assert tables[0]["top_logprobs"] == [None, {"p1 ": -0.5}]
    assert (tables[0]["text_offset"], tables[1]["text_offset"]) == ([0, 3], [6, 9])


@pytest.mark.parametrize("path", PATHS)
def test_every_number_is_finite(server: Served, path: str) -> None:
    low = TokenLogprob(1, b"x", -12345.0, (TokenLogprob(2, b"y", -0.1), TokenLogprob(3, b"z", -99999.0)))
    server.engine.script = lambda request: [Delta("x", (1,), (None,), ("x",), (low,)), done(request, 1)]
    asked = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"prompt": "a", "logprobs": 2}
    body = server.chat(**asked).json() if "chat" in path else server.post(path, asked).json()
    told_numbers = [one for one in _numbers(body["choices"][0]["logprobs"]) if isinstance(one, float)]
    assert sorted(told_numbers)[:2] == [-9999.0, -9999.0]
    assert all(math.isfinite(one) for one in told_numbers)


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)
    else:
        yield value


def test_the_picked_token_is_told_beside_likelier_ones(server: Served) -> None:
    """Also where a likelier token writes the same: the likelier one counts."""
    picked = TokenLogprob(1, b"x", -3.0, (TokenLogprob(2, b"y", -0.1),))
    same = TokenLogprob(4, b"y", -5.0, (TokenLogprob(2, b"y", -0.1),))
    server.engine.script = lambda request: [
        Delta("xy", (1, 4), (None, None), ("x", "y"), (picked, same)),
        done(request, 2),
    ]
    table = server.post("/v1/completions", {"prompt": "a", "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert table["top_logprobs"] == [{"y": -0.1, "x": -3.0}, {"y": -0.1}]
    assert table["token_logprobs"] == [-3.0, -5.0]


def test_the_name_of_llama_server(server: Served) -> None:
    entries = server.chat(n_probs=2).json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 10
    assert server.engine.requests[-1].logprobs == 2
    server.post("/v1/completions", {"prompt": "a", "n_probs": 3})
    assert server.engine.requests[-1].logprobs == 3
    for path, both in ((PATHS[0], {"logprobs": True}), (PATHS[1], {"logprobs": 0})):
        body = {"messages": HI, "prompt": "a", "n_probs": 1, **both}
        error = server.post(path, body).json()["error"]
        assert (error["param"], error["code"]) == ("n_probs", "invalid_value")


def test_a_prompt_of_one_token_has_nothing_to_tell(server: Served) -> None:
    server.engine.script = lambda request: [
        Echo((5,), ("p",), (None,)),
        Delta("x", (1,), (None,), ("x",), (told(1, "x", 0),)),
        done(request, 1),
    ]
    table = server.post("/v1/completions", {"prompt": [5], "echo": True, "logprobs": 0}).json()["choices"][0][
        "logprobs"
    ]
    assert table == {
        "tokens": ["p", "x"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"x": -0.5}],
        "text_offset": [0, 1],
    }
