"""Finished outputs of all requests, kept for drafting from; a request is drafted for only from text of its own key.

Documents stand one behind the other in one array. A document's key enters the hash its runs are found by, and is
compared again for every place found, so that a collision shows nothing. No run and no continuation crosses a border.

The least recently used documents are forgotten first; adding and drafting count as use. When the array is full, the
most recently used half of its tokens moves to the front and is indexed anew. That is a pause in proportion to the
capacity, so it is made rarely and for half the tokens; in between nothing moves and every document in the array lives.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.api import Request
from slipstream.engine.speculate.text.occurrences import Occurrences

LENGTHS = (3, 8, 24)  # shorter runs say little in a text of someone else's; each costs a third of the pause
LEAST = 16  # tokens of a document


@dataclass(slots=True)
class Document:
    """A finished output: its key, where it begins and ends in the text, when it was last used."""

    key: str
    start: int
    end: int
    used: int


@dataclass(frozen=True, slots=True)
class Found:
    """Places where a context occurred, newest first, and the documents they are in."""

    text: NDArray[np.int32]  # [n_tokens] int32
    places: NDArray[np.int32]  # [n_places] int32
    documents: list[Document]  # [n_places]

    @property
    def spans(self) -> NDArray[np.int64]:
        """Where each place's document begins and ends, [n_places, 2] int64."""
        return np.array([(document.start, document.end) for document in self.documents], np.int64)


class SharedHistory:
    """At most `capacity` tokens of finished outputs, and at least half of that once so much was added."""

    def __init__(self, capacity: int, mode: str) -> None:
        """`mode`: "tenant", outputs serve requests of the same tenant, or "all". Raises ValueError for others."""
        if mode not in ("tenant", "all"):
            raise ValueError(f"shared history is of a tenant or of all, not {mode!r}")
        self._mode = mode
        self._text = np.empty(capacity, np.int32)  # [capacity]
        self._index = Occurrences(LENGTHS)
        self._documents: list[Document] = []  # as they stand in the text
        self._n_uses = 0

    def key(self, request: Request) -> str:
        """The key of what a request adds and may see."""
        return request.tenant if self._mode == "tenant" else ""

    @property
    def n_tokens(self) -> int:
        """Tokens kept."""
        return self._documents[-1].end if self._documents else 0

    def add(self, key: str, tokens: NDArray[np.int32]) -> None:
        """Keep a finished output, [n_tokens] int32: the last quarter of the capacity at most, nothing under 16."""
        tokens = tokens[-(len(self._text) // 4) :]
        if len(tokens) < LEAST:
            return
        if self.n_tokens + len(tokens) > len(self._text):
            self._forget()
        self._n_uses += 1
        self._put(key, tokens, self._n_uses)

    def find(self, key: str, context: NDArray[np.int32], limit: int) -> Found:
        """Places of the longest run the context ends in, in documents of this key; `context` [n_context] int32."""
        text = self._text[: self.n_tokens]
        _, places = self._index.longest(text, context, limit, salt=salt_of(key))
        found = [(place, self._document_at(place)) for place in places.tolist()]
        own = [(place, document) for place, document in found if document.key == key]
        return Found(text, np.array([place for place, _ in own], np.int32), [document for _, document in own])

    def use(self, found: Found) -> None:
        """Its newest document is drafted from."""
        self._n_uses += 1
        found.documents[0].used = self._n_uses

    def _document_at(self, place: int) -> Document:
        return self._documents[bisect_right(self._documents, place, key=attrgetter("start")) - 1]

    def _put(self, key: str, tokens: NDArray[np.int32], used: int) -> None:
        """Add a document behind the others."""
        start, end = self.n_tokens, self.n_tokens + len(tokens)
        self._text[start:end] = tokens
        self._documents.append(Document(key, start, end, used))
        self._index.learn(self._text[:end], start, salt_of(key))

    def _forget(self) -> None:
        """Keep the most recently used documents that fill half the array at most."""
        kept, room = list[Document](), len(self._text) // 2
        for document in sorted(self._documents, key=attrgetter("used"), reverse=True):
            room -= document.end - document.start
            if room < 0:
                break
            kept.append(document)
        self._documents = []
        self._index.clear()
        # Documents only move forward, so none is overwritten before it has moved.
        for document in sorted(kept, key=attrgetter("start")):
            self._put(document.key, self._text[document.start : document.end], document.used)


def salt_of(key: str) -> int:
    """64 bits of a key's hash."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
