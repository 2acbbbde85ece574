"""The content of a message while it is generated: blocks made of a reply's pieces, and an event for each change.

The order of events is that of Anthropic's API: a block starts, grows and stops before the next one starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from slipstream.server.anthropic.content_blocks import CALL_PREFIX
from slipstream.server.openai.formats.format import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
)
from slipstream.server.openai.message import call_id

Event = dict[str, Any]


class WrittenBlocks:
    """`blocks` is what is there so far; a block that is still written has no text yet."""

    def __init__(self, *, hides_thinking: bool) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._hides_thinking = hides_thinking
        self._open: type[Piece] | None = None  # what the last block is made of, if it is still written
        self._texts: list[str] = []  # of the open block

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """The events that pieces make."""
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, Content):
                events += self._write(piece, {"type": "text", "text": ""}, "text_delta", "text")
            elif isinstance(piece, Reasoning):
                if not self._hides_thinking:
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    events += self._write(piece, block, "thinking_delta", "thinking")
            elif isinstance(piece, CallStart):
                call = {"type": "tool_use", "id": CALL_PREFIX + call_id(), "name": piece.name, "input": {}}
                events += [*self.close(), self._begin(CallStart, call)]
            elif isinstance(piece, CallArguments):
                self._texts.append(piece.text)
                events.append(self._delta("input_json_delta", partial_json=piece.text))
            elif isinstance(piece, CallEnd):
                events += self.close()
        return events

    def close(self) -> list[Event]:
        """The events that end the open block, if there is one."""
        if self._open is None:
            return []
        block, text, signed = self.blocks[-1], "".join(self._texts), []
        if self._open is CallStart:
            block["input"] = arguments(text)
        elif self._open is Reasoning:
            block["thinking"] = text
            # There is nothing to prove here; clients keep a block for later turns only if it was signed.
            signed = [self._delta("signature_delta", signature="")]
        else:
            block["text"] = text
        self._open = None
        return [*signed, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _write(self, piece: Content | Reasoning, block: dict[str, Any], kind: str, name: str) -> list[Event]:
        if not piece.text:
            return []
        begun = [] if self._open is type(piece) else [*self.close(), self._begin(type(piece), block)]
        self._texts.append(piece.text)
        return [*begun, self._delta(kind, **{name: piece.text})]

    def _begin(self, kind: type[Piece], block: dict[str, Any]) -> Event:
        self._open, self._texts = kind, []
        self.blocks.append(block)
        return {
            "type": "content_block_start",
            "index": len(self.blocks) - 1,
            "content_block": dict(block),
        }

    def _delta(self, kind: str, **fields: str) -> Event:
        return {
            "type": "content_block_delta",
            "index": len(self.blocks) - 1,
            "delta": {"type": kind, **fields},
        }


def arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; of a call that was cut short, as much as is there."""
    try:
        found = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
