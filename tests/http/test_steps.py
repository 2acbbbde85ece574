"""`spec_detail`: what each step of a reply drafted, as scripted, in streams and whole replies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, get_args

import pytest

from slipstream.engine.api import Delta, Request
from slipstream.engine.drafting import WhyNot
from tests.http.fake import done, stepped
from tests.http.serving import Served

PATHS = ("/v1/chat/completions", "/v1/completions")
# The prompt's step; a draft of which two tokens are kept; nothing drafted; all of a draft cut at the end of the text.
SCRIPT = (
    stepped(0, "a", why_not=None),
    stepped(1, "bb ccc dddd", "bb ccc xxxxx yyyyyy", 2),
    stepped(2, "e", why_not="rows_too_dear"),
    stepped(3, "ff ggg", "ff ggg hhhh", 2),
)
STEPS = [
    {"index": 0, "drafter": None, "drafted": [], "drafted_pieces": [], "n_accepted": 0, "why_not": None},
    {
        "index": 1,
        "drafter": "ngram-simple",
        "drafted": [3, 4, 6, 7],
        "drafted_pieces": ["bb ", "ccc ", "xxxxx ", "yyyyyy "],
        "n_accepted": 2,
        "why_not": None,
    },
    {
        "index": 2,
        "drafter": None,
        "drafted": [],
        "drafted_pieces": [],
        "n_accepted": 0,
        "why_not": "rows_too_dear",
    },
    {
        "index": 3,
        "drafter": "ngram-simple",
        "drafted": [3, 4, 5],
        "drafted_pieces": ["ff ", "ggg ", "hhhh "],
        "n_accepted": 2,
        "why_not": None,
    },
]


def script(request: Request) -> Iterator[Any]:
    yield from SCRIPT if request.steps else [replace(one, steps=()) for one in SCRIPT]
    yield done(request, 7)


def details(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The `spec` of a choice's chunks."""
    return [
        chunk["spec"]
        for chunk in chunks
        if "spec" in chunk and chunk["choices"] and chunk["choices"][0]["index"] == index
    ]


def whole(server: Served, path: str, **fields: Any) -> list[list[dict[str, Any]]]:
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "a b"}
    told: list[list[dict[str, Any]]] = server.post(path, {**body, "spec_detail": True, **fields}).json()[
        "spec"
    ]
    return told


@pytest.mark.parametrize("path", PATHS)
def test_steps_come_with_the_tokens_they_brought(server: Served, path: str) -> None:
    server.engine.script = script
    chunks = server.events(path, spec_detail=True)
    told = details(chunks)
    assert [one["steps"] for one in told] == [[step] for step in STEPS]
    assert [one["sources"] for one in told][1] == ["ngram-simple", "ngram-simple", None]
    assert not any("spec" in one or "steps" in one for chunk in chunks for one in chunk["choices"])
    assert [one["steps"] for one in whole(server, path)[0]] == [[step] for step in STEPS]
    assert whole(server, path)[0] == told, "a whole reply has what the chunks of a stream have"


@pytest.mark.parametrize("path", PATHS)
def test_a_merged_chunk_has_all_its_steps(server: Served, path: str) -> None:
    rest = SCRIPT[1:]
    names = ("token_ids", "sources", "pieces", "logprobs", "steps")
    lists = [tuple(chain.from_iterable(getattr(one, name) for one in rest)) for name in names]
    joined = Delta("".join(one.text for one in rest), *lists)
    server.engine.script = lambda request: [SCRIPT[0], joined, done(request, 7)]
    for told in (details(server.events(path, spec_detail=True)), whole(server, path)[0]):
        assert [one["steps"] for one in told] == [STEPS[:1], STEPS[1:]]


def test_each_choice_has_its_own(server: Served) -> None:
    def apart(request: Request) -> Iterator[Any]:
        first = int(request.id.rsplit("-", 1)[1])
        yield from SCRIPT[first:]
        yield done(request, 6)

    server.engine.script = apart
    chunks = server.events(n=2, spec_detail=True)
    for index, told in enumerate(whole(server, PATHS[0], n=2)):
        steps = [[step] for step in STEPS[index:]]
        assert [one["steps"] for one in told] == steps
        assert [one["steps"] for one in details(chunks, index)] == steps


def test_no_step_is_asked_for_or_told_without_it(server: Served) -> None:
    server.engine.script = script
    for fields in ({}, {"spec_detail": False}, {"spec_detail": None}):
        assert not any("spec" in chunk for chunk in server.events(**fields))
        assert "spec" not in server.chat(**fields).json()
    assert not any(request.steps for request in server.engine.requests)
    server.post("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9})
    server.post("/completion", {"prompt": "a"})
    assert not any(request.steps for request in server.engine.requests)


def test_every_reason_may_be_told(server: Served) -> None:
    reasons = [one for part in get_args(WhyNot) for one in get_args(part)]
    server.engine.script = lambda request: [
        *(stepped(i, "a", why_not=one) for i, one in enumerate(reasons)),
        done(request, len(reasons)),
    ]
    told = details(server.events(spec_detail=True))
    assert [step["why_not"] for one in told for step in one["steps"]] == reasons
