"""A format: how a family of models writes thinking and tool calls, as data. `known.py` lists them.

Text becomes pieces: content, reasoning, the start of a call, and the call's arguments as JSON text. A reader makes
pieces of what stands between the markers of calls; `parser.py` finds the markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    text: str  # JSON text, to be joined


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of the call are complete."""


Piece = Content | Reasoning | CallStart | CallArguments | CallEnd
_TEXTS: Any = (Content, Reasoning, CallArguments)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces with neighbours of one kind made one."""
    told: list[Piece] = []
    for kind, group in groupby(pieces, type):
        same: Any = group  # of one kind
        told += [kind("".join(one.text for one in same))] if kind in _TEXTS else same
    return told


class Reader(Protocol):
    """Reads what stands between two markers. What turns out to be no call is told as content, nothing is lost."""

    @property
    def in_string(self) -> bool:
        """Whether what comes next is inside a string, where markers are text."""

    def feed(self, text: str) -> Iterable[Piece]: ...

    def close(self, marker: str) -> Iterable[Piece]:
        """The text has ended, at a marker or (empty) with the reply."""


Tools = Mapping[str, Tool]


@dataclass(frozen=True, slots=True)
class Calls:
    """Markers of tool calls and what they hold."""

    open: str
    close: str | None  # None: calls go on to the reply's end
    reader: Callable[[str, Tools], Reader]  # of the opening marker, which is content if no call follows
    bare: bool = False  # a reply that begins with { may be a call without markers


# The Lark text of a marker: a quoted string, or the name of the token it is.
Mark = Callable[[str], str]


class Enforce(Protocol):
    def __call__(self, tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
        """The Lark grammar of a reply that calls one of the tools; `many` allows more than one call."""


@dataclass(frozen=True, slots=True)
class Format:
    """How one family writes. `signs` are texts that its chat templates have, `others` such that they lack."""

    name: str
    signs: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = None
    calls: Calls | None = None
    between: tuple[str, ...] = ()  # markers around and between calls that say nothing
    inside: tuple[str, ...] = ()  # markers inside a call, which a reader looks for
    enforced: Enforce | None = None
    channels: bool = False  # every message has a header that says what it is

    @property
    def markers(self) -> frozenset[str]:
        """All texts that must be visible for a reply to be understood."""
        around = (self.calls.open, self.calls.close or "") if self.calls else ()
        return frozenset({*(self.reasoning or ()), *around, *self.between, *self.inside} - {""})
