"""Finished outputs of all requests, kept for drafting from; nobody sees the text of another key.

Documents stand one behind the other in one array. A document's key enters the hash its runs are found by, and is
compared again for every place found, so that a collision shows nothing. No run and no continuation crosses a border.

Forgetting: the least recently used first, where used is added or drafted from. When the array is full, the most
recently used half of its tokens moves to the front and is indexed anew. That is a pause in proportion to the capacity,
so it is made rarely and for half the tokens; in between nothing moves and every document in the array is alive.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.api import Request
from slipstream.engine.speculate.text.occurrences import Occurrences

LENGTHS = (3, 8, 24)  # shorter runs say little in a text of someone else's; each costs a third of the pause
LEAST = 16  # tokens of a document


@dataclass(frozen=True, slots=True)
class Found:
    """Places where a context occurred, newest first, and the documents they are in."""

    text: NDArray[np.int32]  # [n_tokens] int32
    places: NDArray[np.int32]  # [n_places] int32
    spans: NDArray[np.int64]  # [n_places, 2] int64: where each place's document begins and ends
    documents: NDArray[np.int64]  # [n_places] int64


class SharedHistory:
    """At most `capacity` tokens of finished outputs, and at least half of that once so much was added."""

    def __init__(self, capacity: int, mode: str) -> None:
        """`mode`: "tenant", outputs serve requests of the same tenant, or "all". Raises ValueError for others."""
        if mode not in ("tenant", "all"):
            raise ValueError(f"shared history is of a tenant or of all, not {mode!r}")
        self._mode = mode
        self._text = np.empty(capacity, np.int32)  # [capacity]
        self._index = Occurrences(LENGTHS)
        self._key_ids: dict[str, int] = {}
        self._n_uses = 0
        # Per document: where it begins and ends, its key's number, when it was last used.
        self._spans = np.empty((0, 2), np.int64)  # [n_room, 2]
        self._keys = np.empty(0, np.int64)  # [n_room]
        self._used = np.empty(0, np.int64)  # [n_room]
        self._n_documents = 0

    def key(self, request: Request) -> str:
        """The key of what a request adds and may see."""
        return request.tenant if self._mode == "tenant" else ""

    @property
    def n_tokens(self) -> int:
        """Tokens kept."""
        return int(self._spans[self._n_documents - 1, 1]) if self._n_documents else 0

    def add(self, key: str, tokens: NDArray[np.int32]) -> None:
        """Keep a finished output, [n_tokens] int32: the last quarter of the capacity at most, nothing under 16."""
        tokens = tokens[-(len(self._text) // 4) :]
        if len(tokens) < LEAST:
            return
        if self.n_tokens + len(tokens) > len(self._text):
            self._forget()
        start, i = self.n_tokens, self._n_documents
        if i == len(self._keys):
            self._grow()
        self._text[start : start + len(tokens)] = tokens
        self._spans[i] = start, start + len(tokens)
        self._n_uses += 1
        # A use's number is nobody else's, so it serves as the number of a key that is new.
        self._keys[i] = self._key_ids.setdefault(key, self._n_uses)
        self._used[i] = self._n_uses
        self._n_documents += 1
        self._index.learn(self._text[: start + len(tokens)], start, salt_of(key))

    def find(self, key: str, context: NDArray[np.int32], limit: int) -> Found:
        """Places of the longest run the context ends in, in documents of this key; `context` [n_context] int32."""
        text, n = self._text[: self.n_tokens], self._n_documents
        _, places = self._index.longest(text, context, limit, salt=salt_of(key))
        documents = np.searchsorted(self._spans[:n, 0], places, side="right") - 1
        mine = self._keys[documents] == self._key_ids.get(key, -1)
        places, documents = places[mine], documents[mine]
        return Found(text, places, self._spans[documents], documents)

    def use(self, found: Found) -> None:
        """Its newest document is drafted from. `found` must be the last answer of `find`."""
        self._n_uses += 1
        self._used[found.documents[0]] = self._n_uses

    def _grow(self) -> None:
        n = max(64, 2 * len(self._keys))
        self._spans = np.resize(self._spans, (n, 2))
        self._keys, self._used = np.resize(self._keys, n), np.resize(self._used, n)

    def _forget(self) -> None:
        """Keep the most recently used documents that fill half the array at most."""
        n = self._n_documents
        sizes = self._spans[:n, 1] - self._spans[:n, 0]
        recent = np.argsort(-self._used[:n])
        n_kept = int(np.searchsorted(np.cumsum(sizes[recent]), len(self._text) // 2, side="right"))
        kept = np.sort(recent[:n_kept])
        # Documents only move forward, so none is overwritten before it has moved.
        ends = np.cumsum(sizes[kept])
        for start, (old_start, old_end) in zip(ends - sizes[kept], self._spans[kept], strict=True):
            self._text[start : start + old_end - old_start] = self._text[old_start:old_end]
        self._keys[:n_kept], self._used[:n_kept] = self._keys[kept], self._used[kept]
        self._spans[:n_kept] = np.stack((ends - sizes[kept], ends), axis=1)
        self._n_documents = n_kept
        in_use = set(self._keys[:n_kept].tolist())
        self._key_ids = {key: i for key, i in self._key_ids.items() if i in in_use}
        salts = {i: salt_of(key) for key, i in self._key_ids.items()}
        self._index.clear()
        for (start, end), i in zip(self._spans[:n_kept].tolist(), self._keys[:n_kept].tolist(), strict=True):
            self._index.learn(self._text[:end], start, salts[i])


def salt_of(key: str) -> int:
    """64 bits of a key's hash."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
