"""The order and shape of a stream, whatever the steps bring: bursts, held-back text, several choices, figures.

One rule each: roles first and in order, one chunk per step, one end per choice, figures last, `[DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.engine.api import Delta, Request
from tests.http.fake import done, echo, told, words
from tests.http.serving import Served

PATHS = ("/v1/chat/completions", "/v1/completions")
ANOTHER = pytest.mark.parametrize("path", PATHS)


def lines(server: Served, path: str, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """A stream's text, of which every event must be one `data:` line, and its chunks."""
    body = {"model": "m", "stream": True, **fields}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": [5, 6]}
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, last, nothing = answer.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    assert all(one.startswith("data: {") and one.endswith("}") and "\n" not in one for one in events)
    return answer.text, [json.loads(one.removeprefix("data: ")) for one in events]


def scripted(steps: list[tuple[str, int]]) -> Callable[[Request], list[Any]]:
    """Steps of (text, tokens): all of a step's text comes with its last token."""

    def script(request: Request) -> list[Any]:
        n_top, events, first = request.logprobs, [], 0
        for text, n_tokens in steps:
            ids = tuple(range(first, first + n_tokens))
            pieces = ("",) * (n_tokens - 1) + (text,) if n_tokens else ()
            table = () if n_top is None else tuple(told(i, f"t{i}", n_top) for i in ids)
            events.append(Delta(text, ids, (None,) * n_tokens, pieces, table))
            first += n_tokens
        return [*([echo(request)] if request.echo else []), *events, done(request, first)]

    return script


def checked(path: str, chunks: list[dict[str, Any]], n: int, *, usage: bool) -> list[list[dict[str, Any]]]:
    """The chunks' choices by index, after what holds for every stream."""
    fixed = ("id", "object", "created", "model", "system_fingerprint")
    assert len({tuple(chunk[name] for name in fixed) for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] >= 0
        assert all(chunk["usage"] is None for chunk in chunks)
        assert all("metrics" not in chunk for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    if "chat" in path:
        assert [choice["index"] for choice in choices[:n]] == list(range(n))
        assert [choice["delta"] for choice in choices[:n]] == [{"role": "assistant", "content": ""}] * n
        choices = choices[n:]
        assert not any("role" in choice["delta"] for choice in choices)
    told: list[list[dict[str, Any]]] = [[] for _ in range(n)]
    for choice in choices:
        told[choice["index"]].append(choice)
    for one in told:
        assert [choice["finish_reason"] for choice in one] == [None] * (len(one) - 1) + ["stop"]
        assert one[-1].get("delta", {}) == {}
        assert one[-1].get("text", "") == ""
    return told


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "Hé ", "🙂", "\n\n", "data: x\n\n", "\r\n", "\u2028", '"}', "\0"]),
        st.integers(0, 6),
    ),
    max_size=6,
)


@ANOTHER
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, n=st.sampled_from([1, 3]), usage=st.booleans(), logprobs=st.booleans(), ids=st.booleans())
def test_any_steps(
    server: Served, path: str, *, steps: list[tuple[str, int]], n: int, usage: bool, logprobs: bool, ids: bool
) -> None:
    """Every step is a chunk of its own with as many entries as tokens, be its text held back or not."""
    server.engine.script = scripted(steps)
    fields: dict[str, Any] = {"n": n, "return_token_ids": ids, "stream_options": {"include_usage": usage}}
    if logprobs:
        fields |= {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}
    _, chunks = lines(server, path, **fields)
    if usage:
        n_tokens = sum(count for _, count in steps)
        assert chunks[-1]["usage"]["completion_tokens"] == n * n_tokens
    for choice in checked(path, chunks, n, usage=usage):
        *pieces, _end = choice
        assert [text_of(one) for one in pieces] == [text for text, _ in steps]
        for piece, (_, count) in zip(pieces, steps, strict=True):
            table = piece["logprobs"]
            entries = table and (table["content"] if "chat" in path else table["tokens"])
            assert len(entries or []) == (count if logprobs else 0)
            assert len(piece.get("token_ids", [])) == (count if ids else 0)


@ANOTHER
def test_whole_and_streamed_say_the_same(server: Served, path: str) -> None:
    server.engine.script = scripted([("", 2), ("ab", 3), ("", 1), ("🙂", 1), ("tail", 0)])
    asked = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2, "echo": True}
    body = {"model": "m", "n": 3, "return_token_ids": True, **asked}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": [5, 6]}
    whole = server.post(path, body).json()["choices"]
    _, chunks = lines(server, path, n=3, return_token_ids=True, **asked)
    for one, streamed in zip(whole, checked(path, chunks, 3, usage=False), strict=True):
        text = one["text"] if "text" in one else one["message"]["content"]
        assert text == "".join(text_of(piece) for piece in streamed)
        assert one["token_ids"] == [i for piece in streamed for i in piece.get("token_ids", [])]
        tables = [piece["logprobs"] for piece in streamed if piece["logprobs"]]
        for name in (
            ("content",) if "chat" in path else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        ):
            assert one["logprobs"][name] == [entry for table in tables for entry in table[name]]
    assert {choice["finish_reason"] for choice in whole} == {"stop"}


@ANOTHER
def test_text_cannot_break_out_of_its_event(server: Served, path: str) -> None:
    hostile = 'x\n\ndata: [DONE]\n\nid: 1\nevent: ping\n: \r\n\r\n"}]}'
    server.engine.script = scripted([(hostile, 1)])
    text, chunks = lines(server, path)
    (choice,) = checked(path, chunks, 1, usage=False)
    assert text_of(choice[0]) == hostile
    assert all(line == "" or line.startswith("data: ") for line in text.split("\n"))


@ANOTHER
def test_a_reply_without_text(server: Served, path: str) -> None:
    """The end token comes first: a choice that only ends, and no half tables."""
    server.engine.script = scripted([])
    _, chunks = lines(server, path, n=3, return_token_ids=True)
    assert [len(choice) for choice in checked(path, chunks, 3, usage=False)] == [1, 1, 1]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "logprobs": True}
    choice = server.post(path, body | ({"logprobs": 1} if "chat" not in path else {})).json()["choices"][0]
    assert choice["logprobs"] is None
    assert (choice.get("text", ""), choice.get("message", {}).get("content", "")) == ("", "")


def test_choices_that_end_apart(server: Served) -> None:
    """The figures wait for the slowest choice, whichever it is; each choice ends once, where it ends."""
    for slowest in range(3):

        def script(request: Request, slowest: int = slowest) -> Any:
            return words(request, delay_s=0.02 if request.id.endswith(f"-{slowest}") else 0.0)

        server.engine.script = script
        _, chunks = lines(server, PATHS[0], n=3, stream_options={"include_usage": True})
        ends = [one["choices"][0]["index"] for one in chunks[:-1] if one["choices"][0]["finish_reason"]]
        assert sorted(ends) == [0, 1, 2]
        assert ends[-1] == slowest
        checked(PATHS[0], chunks, 3, usage=True)


@ANOTHER
def test_nothing_comes_before_the_first_token(server: Served, path: str) -> None:
    """Benchmarks of other servers, vLLM's among them, take the first chunk for the first token and time it."""
    made: list[Request] = []

    def slow(request: Request) -> Any:
        yield 0.2
        made.append(request)
        yield from words(request)

    server.engine.script = slow
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "a", "stream": True}
    with server.http.stream("POST", path, json=body) as answer:
        first = next(line for line in answer.iter_lines() if line.startswith("data:"))
        assert made, f"{first} came before"


@pytest.mark.parametrize("path", [*PATHS, "/completion", "/v1/responses", "/v1/messages"])
def test_readers_that_know_more_line_ends_find_none_inside_an_event(server: Served, path: str) -> None:
    """httpx's `iter_lines` goes by `str.splitlines`."""
    text = "".join(chr(one) for one in (0x85, 0x2028, 0x2029, 0x0B, 0x1C, 0x1D, 0x1E, 0x2027, 0xA8))
    server.engine.script = lambda request: [Delta(text, (5,), (None,), (text,)), done(request, 1)]
    said: Any = [{"role": "user", "content": "a"}]
    name = (
        "messages" if "chat" in path or "messages" in path else "input" if "responses" in path else "prompt"
    )
    body = {name: said if name == "messages" else "a"} | ({"max_tokens": 9} if "messages" in path else {})
    with server.http.stream("POST", path, json={**body, "stream": True}) as answer:
        found = [one.removeprefix("data: ") for one in answer.iter_lines() if one.startswith("data: {")]
        assert answer.status_code == 200
    told = json.dumps([json.loads(one) for one in found])
    assert json.dumps(text)[1:-1] in told
