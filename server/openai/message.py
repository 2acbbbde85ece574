"""A chat choice's pieces as OpenAI's message, whole and as the `delta` of each chunk.

Clients concatenate the strings of a stream, so only the first piece of a call has an id, a type and a name.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from typing import Any

from slipstream.server.openai.formats.format import CallArguments, CallStart, Content, Piece, Reasoning

LETTERS = string.ascii_letters + string.digits
N_ID = 9  # length of a call's id: Mistral's templates require exactly 9 letters and digits
FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
    "none": (),
}


def call_id() -> str:
    """A new id for a call."""
    return "".join(secrets.choice(LETTERS) for _ in range(N_ID))


class Message:
    """A message while it is generated. `reasoning_fields`: the fields that thinking is put into."""

    def __init__(self, reasoning_fields: tuple[str, ...]) -> None:
        self._fields = reasoning_fields
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, arguments

    def add(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Add pieces to the message. Returns the `delta` that they make."""
        delta: dict[str, Any] = {}
        for piece in pieces:
            if isinstance(piece, Content):
                self._content.append(piece.text)
                delta["content"] = delta.get("content", "") + piece.text
            elif isinstance(piece, Reasoning):
                self._reasoning.append(piece.text)
                for name in self._fields:
                    delta[name] = delta.get(name, "") + piece.text
            elif isinstance(piece, CallStart):
                self._calls.append((call_id(), piece.name, []))
                delta.setdefault("tool_calls", []).append(self._opening())
            elif isinstance(piece, CallArguments):
                self._argue(piece.text, delta)
        return delta

    def whole(self) -> dict[str, Any]:
        """The message without its role."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: dict[str, Any] = {"content": None if self._calls and not content else content}
        if reasoning:
            message |= dict.fromkeys(self._fields, reasoning)
        if self._calls:
            message["tool_calls"] = [
                {"id": one, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for one, name, arguments in self._calls
            ]
        return message

    def _opening(self) -> dict[str, Any]:
        """The first entry of the last call."""
        one, name, _ = self._calls[-1]
        function = {"name": name, "arguments": ""}
        return {"index": len(self._calls) - 1, "id": one, "type": "function", "function": function}

    def _argue(self, text: str, delta: dict[str, Any]) -> None:
        """Add arguments to the last call. The `delta` has at most one entry per call."""
        self._calls[-1][2].append(text)
        entries = delta.setdefault("tool_calls", [])
        index = len(self._calls) - 1
        if not entries or entries[-1]["index"] != index:
            entries.append({"index": index, "function": {"arguments": ""}})
        entries[-1]["function"]["arguments"] += text
