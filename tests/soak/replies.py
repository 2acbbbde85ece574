"""What a reply says, read alike from a whole answer and from a stream, so that the two can be compared."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = "data: [DONE]"


class Lost(Exception):
    """A request came to no end: neither a complete answer nor an error."""


class Fault(Exception):
    """An answer that the request should not have had."""


class Different(Exception):
    """A reply with another text than the same request had with the same seed."""


@dataclass(slots=True)
class Choice:
    """One choice of a reply. Ids of tool calls are drawn at random, so they are left out."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)  # [name, arguments]
    logprobs: list[tuple[str, float | None]] = field(default_factory=list)
    reason: str | None = None

    def add(self, piece: Mapping[str, Any]) -> None:
        """Take up a whole choice, or what a chunk of a stream has of it."""
        said = piece.get("message") or piece.get("delta") or {}
        self.text += piece.get("text") or said.get("content") or ""
        self.reasoning += said.get("reasoning_content") or ""
        for place, call in enumerate(said.get("tool_calls") or ()):
            told = self.calls.setdefault(call.get("index", place), ["", ""])
            told[0] += call["function"].get("name") or ""
            told[1] += call["function"].get("arguments") or ""
        self.logprobs += _logprobs(piece.get("logprobs") or {})
        self.reason = piece.get("finish_reason") or self.reason


def _logprobs(told: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    if "content" in told:
        return [(one["token"], one["logprob"]) for one in told["content"]]
    return list(zip(told.get("tokens", ()), told.get("token_logprobs", ()), strict=True))


def _gather(choices: dict[int, Choice], pieces: Sequence[Mapping[str, Any]]) -> None:
    for piece in pieces:
        choices.setdefault(piece["index"], Choice()).add(piece)


def _complete(choices: Mapping[int, Choice]) -> list[Choice]:
    """In order. Raises Lost where a choice has no end."""
    ordered = [choices[index] for index in sorted(choices)]
    if not ordered or any(one.reason is None for one in ordered):
        raise Lost(f"a choice without an end: {ordered}")
    return ordered


def whole(answer: Mapping[str, Any]) -> list[Choice]:
    """The choices of an answer in one piece."""
    choices: dict[int, Choice] = {}
    _gather(choices, answer["choices"])
    return _complete(choices)


async def streamed(lines: AsyncIterator[str]) -> list[Choice]:
    """The choices of a stream. Raises Lost if it breaks off, Fault if it ends in an error."""
    choices: dict[int, Choice] = {}
    last = ""
    async for line in lines:
        if not line:
            continue
        if last == DONE:
            raise Fault(f"after [DONE]: {line[:200]}")
        last = line
        if line == DONE or not line.startswith("data: "):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise Fault(f"an error in the stream: {chunk['error']}")
        _gather(choices, chunk["choices"])
    if last != DONE:
        raise Lost(f"the stream has no end: {last[:200]!r}")
    return _complete(choices)
