"""A chat choice's text as OpenAI's message: content, reasoning, tool calls. The parsers in `formats` split the text.

Clients concatenate the strings of a stream, so only the first piece of a call has an id, a type and a name.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slipstream.engine.api import Delta, Done
from slipstream.server.openai.formats.format import CallArguments, CallStart, Content, Piece, Reasoning, Tools
from slipstream.server.openai.formats.reading import Known, parser_of

LETTERS = string.ascii_letters + string.digits
N_ID = 9  # length of a call's id: Mistral's templates require exactly 9 letters and digits
FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
    "none": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the replies of a request are read. Calling it with the end of the prompt makes a choice's `Message`."""

    known: Known
    tools: Tools = field(default_factory=dict)
    most_calls: int | None = None
    reasoning_field: str = "reasoning_content"  # a key of `FIELDS`
    continued: str | None = None  # the reply's beginning, if the client sent it to be continued
    silent: frozenset[str] = frozenset()  # tokens to leave out of the text

    def __call__(self, prompt_tail: str) -> Message:
        reasoning = self.known.format.reasoning
        if self.continued is None or reasoning is None:
            return Message(self, prompt_tail)
        opener, closer = reasoning
        return Message(self, opener if self.continued.rfind(opener) > self.continued.rfind(closer) else "")


class Message:
    """A choice's message while it is generated: a `Parser` of `forms.py`."""

    def __init__(self, reading: Reading, prompt_tail: str) -> None:
        self._reading = reading
        self._fields = FIELDS[reading.reasoning_field]
        self._parser = parser_of(
            reading.known.format,
            reading.tools,
            prompt_tail,
            most_calls=reading.most_calls,
            thinks_aloud=not self._fields,
        )
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, arguments
        self._n_ended = 0  # calls
        can_think = reading.known.format.reasoning or reading.known.format.channels
        self.n_reasoning: int | None = 0 if can_think else None

    @property
    def is_ended(self) -> bool:
        """Whether no further text would be sent."""
        return self._parser.is_ended

    def feed(self, delta: Delta) -> dict[str, Any]:
        told: dict[str, Any] = {}
        # Without pieces the text cannot be divided among its tokens: all count as what the last of them is.
        n_tokens = 1 if delta.pieces else len(delta.token_ids)
        for text in delta.pieces or (delta.text,):
            if text in self._reading.silent:
                continue
            was_thinking = self._parser.is_thinking
            self._tell(self._parser.feed(text), told)
            if self.n_reasoning is not None and (was_thinking or self._parser.is_thinking):
                self.n_reasoning += n_tokens
        return told

    def finish(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        self._tell(self._parser.finish(), told)
        return told

    def message(self) -> dict[str, Any]:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        told: dict[str, Any] = {"content": None if self._calls and not content else content}
        if reasoning:
            told |= dict.fromkeys(self._fields, reasoning)
        if self._calls:
            told["tool_calls"] = [
                {"id": one, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for one, name, arguments in self._calls
            ]
        return told

    def reason(self, done: Done) -> str:
        is_called = self._calls and self._n_ended == len(self._calls)
        return "tool_calls" if is_called and done.reason == "stop" else done.reason

    def _tell(self, pieces: Iterable[Piece], told: dict[str, Any]) -> None:
        """Add pieces to the `delta` and to the message."""
        for piece in pieces:
            if isinstance(piece, Content):
                self._content.append(piece.text)
                told["content"] = told.get("content", "") + piece.text
            elif isinstance(piece, Reasoning):
                self._reasoning.append(piece.text)
                for name in self._fields:
                    told[name] = told.get(name, "") + piece.text
            elif isinstance(piece, CallStart):
                call_id = "".join(secrets.choice(LETTERS) for _ in range(N_ID))
                self._calls.append((call_id, piece.name, []))
                function = {"name": piece.name, "arguments": ""}
                told.setdefault("tool_calls", []).append(
                    {"index": len(self._calls) - 1, "id": call_id, "type": "function", "function": function}
                )
            elif isinstance(piece, CallArguments):
                self._argue(piece.text, told)
            else:
                self._n_ended += 1

    def _argue(self, text: str, told: dict[str, Any]) -> None:
        """Add arguments to the last call. The `delta` has at most one entry per call."""
        self._calls[-1][2].append(text)
        entries = told.setdefault("tool_calls", [])
        index = len(self._calls) - 1
        if not entries or entries[-1]["index"] != index:
            entries.append({"index": index, "function": {"arguments": ""}})
        entries[-1]["function"]["arguments"] += text
