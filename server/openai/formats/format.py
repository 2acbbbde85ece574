"""The type `Format`: how a family of models writes thinking and tool calls, as data. `known.py` lists all formats.

The text of a reply becomes pieces: content, reasoning, the start of a call, its arguments as JSON text, its end.
`parser.py` finds the markers of calls; a format's `Reader` makes pieces of the text between them.
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
    """The pieces, with neighbouring texts of the same kind joined."""
    told: list[Piece] = []
    for kind, group in groupby(pieces, type):
        same: Any = group  # of one kind
        told += [kind("".join(one.text for one in same))] if kind in _TEXTS else same
    return told


class Reader(Protocol):
    """Reads the text between the two markers of a call. Text that turns out to be no call becomes content."""

    @property
    def in_string(self) -> bool:
        """Whether the next character is inside a string, where markers are text."""

    def feed(self, text: str) -> Iterable[Piece]: ...

    def close(self, marker: str) -> Iterable[Piece]:
        """The pieces left now that the text has ended: at the closing `marker`, or (empty) with the reply."""


Tools = Mapping[str, Tool]


@dataclass(frozen=True, slots=True)
class Calls:
    """The markers of tool calls, and the reader of the text between them."""

    open: str
    close: str | None  # None: calls go on to the reply's end
    reader: Callable[[str, Tools], Reader]  # takes the opening marker, which is content if no call follows
    bare: bool = False  # a reply that begins with { may be a call without markers
    begins: str = ""  # pattern of how a call goes on behind its marker and white space
    # How a call begins whose opening marker the model left out: the text before its name, the pattern behind that.
    unmarked: tuple[str, str] | None = None


# From a marker to its Lark text: a quoted string or, if the marker is a token, that token.
Mark = Callable[[str], str]


class Enforce(Protocol):
    def __call__(self, tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
        """The Lark grammar of a reply that calls one of the tools; `many` allows more than one call."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes. Its chat templates contain all texts of `signs` and none of `others`."""

    name: str
    signs: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = None
    calls: Calls | None = None
    between: tuple[str, ...] = ()  # markers around and between calls, which are dropped
    around: tuple[str, ...] = ()  # markers around content, which are dropped, also where no tools are
    inside: tuple[str, ...] = ()  # markers inside a call, which a reader looks for
    enforced: Enforce | None = None
    channels: bool = False  # every message has a header that says what it is, as in Harmony
    lone: bool = False  # the template refuses turns with more than one call
    instructs: bool = False  # tools are told of in a message, and earlier calls shown as text (`generic.py`)

    @property
    def thoughts(self) -> tuple[str, str] | None:
        """What opens and closes the thinking that a reply may begin with; None: nothing, as far as is known."""
        return ("<|channel|>analysis<|message|>", "<|end|>") if self.channels else self.reasoning

    @property
    def markers(self) -> frozenset[str]:
        """All markers that must be in a reply's text for the reply to be understood."""
        calls = (self.calls.open, self.calls.close or "") if self.calls else ()
        return frozenset({*(self.reasoning or ()), *calls, *self.between, *self.around, *self.inside} - {""})
