"""How a chat template takes turns of the assistant that call tools, found out by having it write some.

Such a turn may have no content, or thoughts and content beside its calls. Templates differ in what they make of that,
and some refuse it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

THOUGHT, SAID, NAME = "aSlotForThoughts", "aSlotForContent", "aSlotForName"
ID = "aSlotForI"  # nine letters, as Mistral's templates want them
CALL = {"id": ID, "type": "function", "function": {"name": NAME, "arguments": {}}}
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": SAID, "parameters": {"type": "object", "properties": {}}},
}
# What a template writes of null if it does not look whether there is a value.
NO_VALUE = re.compile("None|null")

# From the turns of a conversation and keywords to what the template writes; None if it refuses them.
Write = Callable[[Sequence[Any], Mapping[str, Any]], str | None]


@dataclass(frozen=True, slots=True)
class CallTurns:
    """What a template makes of turns with calls.

    nothing: the content of those that have none, null or empty; joins: beside calls it refuses both content and
    thoughts, so that a turn's content is told at the end of its thoughts.
    """

    nothing: str | None
    joins: bool

    def with_thoughts(self, message: Mapping[str, Any], thoughts: str) -> dict[str, Any]:
        """A turn with its thoughts, under the names that templates read."""
        if (
            self.joins
            and thoughts
            and message.get("tool_calls")
            and (said := _text_of(message.get("content")))
        ):
            thoughts = f"{thoughts}\n\n{said}"
            message = {**message, "thinking": thoughts, "content": self.nothing}
        return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def call_turns(write: Write, question: Any) -> CallTurns:
    """How the template behind `write` takes turns with calls. `question`: a user's content in the form it takes."""

    def written(content: str | None, **more: str) -> list[str | None]:
        """A conversation up to the call, and up to its result: some templates look only at turns before the last."""
        called = {"role": "assistant", "content": content, "tool_calls": [CALL], **more}
        result = {"role": "tool", "tool_call_id": ID, "name": NAME, "content": question}
        turns = [{"role": "user", "content": question}, called, result]
        return [write(turns[:2], {"tools": [TOOL]}), write(turns, {"tools": [TOOL]})]

    nothing = "" if _is_better(written(""), written(None)) else None
    thoughts = {"thinking": THOUGHT, "reasoning_content": THOUGHT}
    pairs = zip(written(SAID, **thoughts), written(nothing, **thoughts), strict=True)
    return CallTurns(nothing, any(both is None and THOUGHT in (one or "") for both, one in pairs))


def _is_better(empty: Sequence[str | None], null: Sequence[str | None]) -> bool:
    """Whether a template takes empty contents where it refuses null, or writes null as a word."""
    n_empty, n_null = (sum(one is not None for one in some) for some in (empty, null))
    if n_empty != n_null:
        return n_empty > n_null
    of_empty, of_null = (sum(len(NO_VALUE.findall(one or "")) for one in some) for some in (empty, null))
    return of_null > of_empty


def _text_of(content: Any) -> str:
    """A content's text, whether it is one text or parts."""
    if isinstance(content, list):
        return "\n".join(one["text"] for one in content if "text" in one)
    return content or ""
