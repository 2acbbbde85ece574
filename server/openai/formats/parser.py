"""Splits the text of a reply into pieces: thinking, content, calls. However the text is divided into parts, the joined
pieces are the same.

`scanner.py` finds the markers; the text between the markers of calls is read by the format's own reader, so that it
can be streamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from slipstream.server.openai.formats.format import (
    CallStart,
    Content,
    Format,
    Piece,
    Reader,
    Reasoning,
    Tools,
)
from slipstream.server.openai.formats.reply_parser import ReplyParser
from slipstream.server.openai.formats.scanner import AT_ONCE, CLOSES, OPENS, Event, compiled, scanner

REASONING, CALL, UNMARKED = "reasoning", "call", "unmarked"
STRAY, BETWEEN, CONTENT = "stray", "between", "content"


@lru_cache(maxsize=32)
def _template(format_: Format, *, with_calls: bool, is_forced: bool, names: tuple[str, ...]) -> Any:
    """The format's markers, compiled for `scanner`. `names`: of the tools whose calls may lack their marker."""
    fields: dict[str, dict[str, Any]] = {CONTENT: {}}
    if format_.reasoning:
        fields[REASONING] = _thinking(format_, format_.reasoning, with_calls=with_calls and not is_forced)
    if with_calls and format_.calls:
        fields[CALL] = {"open": format_.calls.open}
        if format_.calls.close:
            fields[CALL]["close"] = format_.calls.close
            fields[STRAY] = {"open": format_.calls.close, "close_pattern": AT_ONCE}
        if names and format_.calls.unmarked:
            begins = _unmarked(format_.calls.unmarked, names, format_.reasoning)
            fields[UNMARKED] = {"open_pattern": begins, "close_pattern": AT_ONCE}
    dropped = [*format_.around, *(format_.between if with_calls and format_.calls else ())]
    for marker in dropped:  # a field each, as its name is all that an event tells of a marker
        fields[BETWEEN + marker] = {"open": marker, "close_pattern": AT_ONCE}
    return compiled(fields)


def _thinking(format_: Format, reasoning: tuple[str, str], *, with_calls: bool) -> dict[str, Any]:
    """The markers of thinking. White space in patterns is bounded, as they are searched again with every token."""
    opener, closer = map(re.escape, reasoning)
    # Only at its beginning can a reply open a thinking part; further on, text may merely mention the marker.
    opens = rf"\A\s{{0,8}}{opener}"
    if not (with_calls and format_.calls):
        return {"open_pattern": opens, "close": reasoning[1]}
    # Models forget the closing marker before a call, so a call ends thinking too. It has to begin a line and to go on
    # as a call does: thinking may merely mention the marker.
    before = "".join(rf"(?:{re.escape(one)}\s{{0,8}})?" for one in format_.between)
    call = rf"{before}{re.escape(format_.calls.open)}\s{{0,8}}{format_.calls.begins}"
    return {"open_pattern": opens, "close_pattern": rf"{closer}|(?<=\n|{opener})(?={call})"}


def _unmarked(parts: tuple[str, str], names: Sequence[str], reasoning: tuple[str, str] | None) -> str:
    """The pattern of the text before the name of a call without its marker. It has to begin a line, and to be a tool's
    and go on as a call does, as prose may mention it.
    """
    before, behind = parts
    closed = f"|(?<={re.escape(reasoning[1])})" if reasoning else ""
    return rf"(?:\A|(?<=\n){closed}){re.escape(before)}(?=(?:{'|'.join(map(re.escape, names))}){behind})"


def is_thinking(prompt_tail: str, opener: str) -> bool:
    """Whether the prompt ends with the marker that opens a thinking part; further back, text may merely mention it."""
    return prompt_tail.rstrip().endswith(opener)


class Parser(ReplyParser):
    """Reads a reply. `tools`: those that may be called; if empty, calls are read as content.

    `most_calls`: the reply ends after so many; `thinks_aloud`: thinking is content, with its markers; `is_forced`: a
    grammar holds behind the marker that closes thinking, so only that marker closes it.
    """

    is_thinking = False

    def __init__(
        self,
        format_: Format,
        tools: Tools,
        prompt_tail: str,
        *,
        most_calls: int | None = None,
        thinks_aloud: bool = False,
        is_forced: bool = False,
    ) -> None:
        names = tuple(tools) if format_.calls and format_.calls.unmarked else ()
        template = _template(format_, with_calls=bool(tools), is_forced=is_forced, names=names)
        super().__init__(scanner(template), most_calls)
        self._reasoning = format_.reasoning or ("", "")
        self._calls = format_.calls if tools else None
        self._tools = tools
        self._thinks_aloud = thinks_aloud
        self._reader: Reader | None = None
        self._is_bare = False  # the reader has no markers and goes on to the end
        self._is_fresh = True  # no content has come yet
        self._content = _Trim(is_start=False)
        self._thoughts = _Trim(is_start=True)
        self._n_silent = 0  # 1 if the prompt ends with the opening marker: it is fed, but not put out
        if format_.reasoning and is_thinking(prompt_tail, format_.reasoning[0]):
            self._n_silent = 1
            self.is_thinking = True
            self.feed(format_.reasoning[0])

    def _finished(self, events: Iterable[Event]) -> Iterator[Piece]:
        yield from self._read(events, at_end=True)
        if self._reader:
            yield from self._called(self._reader.close(""))
        if not self._n_calls and (rest := self._content.held):
            yield Content(rest)

    def _read(self, events: Iterable[Event], *, at_end: bool = False) -> Iterator[Piece]:
        for event in events:
            kind, field, text = event["type"], event["field"], event.get("text", "")
            if field == REASONING:
                yield from self._thought(kind, text, at_end=at_end)
            elif field == CONTENT:
                yield from self._plain(text)
            elif field == CALL:
                yield from self._call(kind, text, at_end=at_end)
            elif field == UNMARKED and kind == OPENS:
                yield from self._begun()
            elif field == STRAY and kind == OPENS:
                yield from self._closed()
            elif field.startswith(BETWEEN) and kind == OPENS:
                yield from self._dropped(field.removeprefix(BETWEEN))

    def _thought(self, kind: str, text: str, *, at_end: bool) -> Iterator[Piece]:
        self.is_thinking = kind != CLOSES
        if self._thinks_aloud:
            opener = "" if self._n_silent else self._reasoning[0]
            aloud = {OPENS: opener, CLOSES: "" if at_end else self._reasoning[1]}.get(kind, text)
            self._n_silent = 0
            yield from self._told(aloud)
        elif told := self._thoughts.feed(text):
            yield Reasoning(told)
        if kind == CLOSES and not self._thinks_aloud:
            self._content = _Trim(is_start=True)

    def _plain(self, text: str) -> Iterator[Piece]:
        """Text outside all markers."""
        if self._reader:
            yield from self._called(self._reader.feed(text))
            return
        if self._calls and self._calls.bare and self._is_fresh and text.strip():
            self._is_fresh = False
            if text.lstrip().startswith("{"):
                self._is_bare = True
                self._reader = self._calls.reader("", self._tools)
                yield from self._called(self._reader.feed(text))
                return
        yield from self._told(text)

    def _call(self, kind: str, text: str, *, at_end: bool) -> Iterator[Piece]:
        assert self._calls is not None
        if kind == OPENS and self._reader is None:
            self._reader = self._calls.reader(self._calls.open, self._tools)
        elif kind == CLOSES:
            if not at_end:
                yield from self._closed()
        elif self._reader:
            yield from self._called(self._reader.feed(self._calls.open if kind == OPENS else text))

    def _begun(self) -> Iterator[Piece]:
        """Begin a call without its marker. Inside a parameter that is text; a call before it, without its end, ends."""
        assert self._calls is not None
        assert self._calls.unmarked is not None
        if self._reader and not self._reader.in_string:
            reader, self._reader = self._reader, None
            yield from self._called(reader.close(""))
        self._reader = self._reader or self._calls.reader("", self._tools)
        yield from self._called(self._reader.feed(self._calls.unmarked[0]))

    def _closed(self) -> Iterator[Piece]:
        """Read a call's closing marker. Inside a string of the arguments it is text; without a call it is content."""
        marker = (self._calls and self._calls.close) or ""
        if self._reader is None:
            yield from self._told(marker)
        elif self._is_bare or self._reader.in_string:
            yield from self._called(self._reader.feed(marker))
        else:
            reader, self._reader = self._reader, None
            yield from self._called(reader.close(marker))

    def _dropped(self, marker: str) -> Iterator[Piece]:
        """Leave out a marker that says nothing. Inside a string of the arguments it is text."""
        if self._reader and self._reader.in_string:
            yield from self._called(self._reader.feed(marker))
        else:
            self._content.drop()

    def _called(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, Content):
                yield from self._told(piece.text)
                continue
            if isinstance(piece, CallStart):
                self._n_calls += 1
                self._content = _Trim(is_start=True)
            yield piece

    def _told(self, text: str) -> Iterator[Piece]:
        told = self._content.feed(text)
        if self._calls is None:
            told += self._content.drop()
        if told:
            yield Content(told)


class _Trim:
    """Takes the white space off the end of a text that comes in parts, and off its start if `is_start`."""

    def __init__(self, *, is_start: bool) -> None:
        self._is_start = is_start
        self.held = ""  # white space that is put out only if more text follows

    def feed(self, text: str) -> str:
        if text.isspace():
            self.held += "" if self._is_start else text
            return ""
        text = self.held + text
        if self._is_start:
            text = text.lstrip()
            self._is_start = not text
        told = text.rstrip()
        self.held = text[len(told) :]
        return told

    def drop(self) -> str:
        held, self.held = self.held, ""
        return held
