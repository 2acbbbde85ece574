"""Ends of a completion that editors ask for: at a line that is indented less, and at a line's end when time is up.

Both are found in the text, on the way to the client: the generation is then asked to finish.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from slipstream.engine.api import Delta, Done
from slipstream.server.openai.formats.format import Content, Piece
from slipstream.server.openai.reply_text import ReplyText

LINES = re.compile(r"[^\n]*\n|[^\n]+")


class LimitedText(ReplyText):
    """Text in which every character is content, up to the limits."""

    is_ended = False

    def __init__(
        self, n_indent: int = 0, seconds: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        """n_indent: least white space before each line but the first; seconds: since the first text; 0: no limit."""
        self._n_indent = n_indent
        self._seconds = seconds
        self._now = now
        self._began: float | None = None
        # What a line begins with, until it is known how far it is indented; None: it is known, or does not matter.
        self._held: str | None = None

    def feed(self, delta: Delta) -> Sequence[Piece]:
        self._began = self._now() if self._began is None else self._began
        kept = ""
        self.n_read = len(delta.pieces)
        for n_read, text in enumerate(delta.pieces or (delta.text,), 1):
            for part in LINES.findall(text):
                kept += self._seen(part)
                if self.is_ended:
                    self.n_read = n_read
                    return (Content(kept),)
        return (Content(kept),)

    def finish(self) -> Sequence[Piece]:
        return (Content(self._held),) if self._held and not self.is_ended else ()

    def reason(self, done: Done) -> str:
        return "length" if self.is_ended else done.reason

    def _seen(self, part: str) -> str:
        """What may be sent now that a line, or a part of it, is there."""
        if self._held is not None:
            part = self._held + part
            n_indent = len(part) - len(part.lstrip(" \t"))
            self.is_ended = n_indent < min(self._n_indent, len(part))
            if self.is_ended or n_indent < self._n_indent:
                self._held = part
                return ""
            self._held = None
        if part.endswith("\n"):
            assert self._began is not None
            self.is_ended = 0 < self._seconds < self._now() - self._began
            self._held = "" if self._n_indent else None
        return part
