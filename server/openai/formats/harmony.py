"""Harmony, the format of gpt-oss: every message has a header with a channel, and a recipient if it is a call.

The library `openai-harmony` reads token ids of a single vocabulary, which it downloads. This parser reads text, so it
works with any tokenizer that has these markers, and downloads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Literal

from slipstream.server.openai.formats.format import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Format,
    Piece,
    Reasoning,
    Tools,
)
from slipstream.server.openai.formats.json_call import Value
from slipstream.server.openai.formats.reply_parser import ReplyParser
from slipstream.server.openai.formats.scanner import AT_ONCE, CHUNK, CLOSES, OPENS, Event, compiled, scanner

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]{1,64})")
MOST_HEAD = 256

Kind = Literal["content", "reasoning", "call"]

HARMONY = Format(
    name="harmony",
    signs=(CHANNEL, MESSAGE, "analysis"),
    inside=(START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS),
    channels=True,
)


@lru_cache(maxsize=1)
def _template() -> Any:
    fields = {
        "text": {},
        "head": {"open": [START, CHANNEL], "close": MESSAGE},
        "end": {"open": list(ENDS), "close_pattern": AT_ONCE},
    }
    return compiled(fields)


class HarmonyParser(ReplyParser):
    """Reads a reply of a model that writes channels. The reply may continue a message begun in `prompt_tail`.

    `tools`: those that may be called; `most_calls`: the reply ends after so many; `thinks_aloud`: thinking is content.
    """

    def __init__(
        self, tools: Tools, prompt_tail: str, *, most_calls: int | None = None, thinks_aloud: bool = False
    ) -> None:
        super().__init__(scanner(_template()), most_calls)
        self._tools = tools
        self._thinks_aloud = thinks_aloud
        self._value = Value()  # the arguments of a call
        self._has_arguments = False
        self._called = ""  # the name of the call
        self._head = ""  # of the message to come, as far as it is known
        self._kind: Kind | None = None  # None: between messages
        opened = prompt_tail.rpartition(START)[2]
        if MESSAGE in opened and not any(end in opened for end in ENDS):
            head = opened.partition(MESSAGE)[0]
            self._kind = "reasoning" if "analysis" in head else "content"

    @property
    def is_thinking(self) -> bool:
        return self._kind == "reasoning"

    def _finished(self, events: Iterable[Event]) -> Iterator[Piece]:
        # A header that the reply's end cut off is closed by the parser, but its message never came.
        yield from self._read(one for one in events if (one["type"], one["field"]) != (CLOSES, "head"))
        yield from self._end(at_end=True)
        if self._n_calls == 0 and self._head.strip() and CHANNEL not in self._head:
            yield Content(self._head)

    def _read(self, events: Iterable[Event]) -> Iterator[Piece]:
        for event in events:
            kind, field = event["type"], event["field"]
            if field == "text" and kind == CHUNK:
                yield from self._text(event["text"])
            elif field == "head" and kind == OPENS:
                yield from self._end()
                self._head += CHANNEL  # START too: `_finished` only looks whether the header has any marker
            elif field == "head" and kind == CHUNK:
                self._head += event["text"]
            elif field == "head":
                yield from self._begin()
            elif field == "end" and kind == OPENS:
                yield from self._end()

    def _text(self, text: str) -> Iterator[Piece]:
        if self._kind is None:
            self._head += text
            if len(self._head) > MOST_HEAD:  # no header at all
                self._kind = "content"
                yield Content(self._head)
        elif self._kind == "call":
            for char in text:
                yield from self._argument(char)
        elif self._kind == "reasoning" and not self._thinks_aloud:
            yield Reasoning(text)
        else:
            yield Content(text)

    def _argument(self, char: str) -> Iterator[Piece]:
        """Read a character of a call's arguments, or of what follows them."""
        if self._value.done:
            yield Content(char)
        elif said := self._value.feed(char):
            self._has_arguments = self._has_arguments or not char.isspace()
            yield CallArguments(said)

    def _begin(self) -> Iterator[Piece]:
        """Begin a message, whose header is complete."""
        head, self._head = self._head, ""
        called = RECIPIENT.search(head)
        if called and self._tools:
            self._kind = "call"
            self._value, self._has_arguments = Value(), False
            self._n_calls += 1
            self._called = called[1]
            yield CallStart(self._called)
        else:
            self._kind = "reasoning" if "analysis" in head and not called else "content"

    def _end(self, *, at_end: bool = False) -> Iterator[Piece]:
        """End a message. The token that ends a call has no text, so a call is whole if its arguments are.

        `at_end`: of the reply, which may have been cut. A call without arguments is whole there if none are required.
        """
        if self._kind == "call":
            tool = self._tools.get(self._called)
            is_whole = not at_end or (tool is not None and not tool.parameters.get("required"))
            if not self._has_arguments and is_whole:
                yield CallArguments("{}")
                yield CallEnd()
            elif self._value.done:
                yield CallEnd()
        self._kind = None
