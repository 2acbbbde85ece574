"""The base class of the parsers of replies: text in, joined pieces out, up to the end of the last call wanted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from slipstream.server.openai.formats.format import CallEnd, Piece, joined
from slipstream.server.openai.formats.scanner import Event, Scanner


class ReplyParser(ABC):
    """Reads a reply. A subclass turns the scanner's events into pieces, and counts in `_n_calls` the calls it begins.

    `most_calls`: the reply ends after so many calls; None: it does not.
    """

    is_ended = False  # text has followed that is no part of the message
    _is_full = False  # no more calls are wanted
    _n_calls = 0

    def __init__(self, scanner: Scanner, most_calls: int | None) -> None:
        self._scanner = scanner
        self._most_calls = most_calls

    @property
    @abstractmethod
    def is_thinking(self) -> bool:
        """Whether the text that comes next is thinking, as far as is known."""

    def feed(self, text: str) -> list[Piece]:
        return joined(self._wanted(self._read(self._scanner.feed(text))))

    def finish(self) -> list[Piece]:
        """The pieces that were held back, now that the reply has ended."""
        _, events = self._scanner.finalize()
        return joined(self._wanted(self._finished(events)))

    @abstractmethod
    def _read(self, events: Iterable[Event]) -> Iterator[Piece]:
        """The pieces that the scanner's events make."""

    @abstractmethod
    def _finished(self, events: Iterable[Event]) -> Iterator[Piece]:
        """The pieces that the scanner's last events make, and those that were held back."""

    def _wanted(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The pieces up to the end of the last call wanted. `is_ended` becomes true only if more follow."""
        for piece in pieces:
            if self._is_full:
                self.is_ended = True
                return
            yield piece
            self._is_full = isinstance(piece, CallEnd) and self._n_calls == self._most_calls
