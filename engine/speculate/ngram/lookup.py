"""What ngram-simple and the n-gram maps share: where a slot's last n tokens stood before, and copying from there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import Want
from slipstream.engine.speculate.text.occurrences import Occurrences


@dataclass(frozen=True, slots=True)
class Sizes:
    """Settings of a drafter that copies: the server's, or those in force for a request."""

    n: int  # tokens that must match
    m: int  # most tokens copied
    min_hits: int  # earlier occurrences a match must have

    def asked(self, slot: Slot) -> Sizes:
        """These sizes, with what the slot's request asks for in their place."""
        asked = slot.speculate
        return Sizes(
            n=self.n if asked.ngram_size_n is None else asked.ngram_size_n,
            m=self.m if asked.ngram_size_m is None else asked.ngram_size_m,
            min_hits=self.min_hits if asked.ngram_min_hits is None else asked.ngram_min_hits,
        )


@dataclass(slots=True)
class _Index:
    sizes: Sizes
    seen: Occurrences
    n_learnt: int = 0


class NgramLookup:
    """Per slot an index of the runs of n tokens in its text."""

    def __init__(self, sizes: Sizes, n_slots: int) -> None:
        """Compiles what it uses."""
        self._sizes = sizes
        self._indices: list[_Index | None] = [None] * n_slots
        Occurrences((sizes.n,))

    def begin(self, slot: Slot) -> None:
        """Index the slot's tokens afresh, at the sizes its request asks for."""
        self._indices[slot.id] = None
        self.learn(slot)

    def end(self, slot: Slot) -> None:
        """Forget the slot's text."""
        self._indices[slot.id] = None

    def learn(self, slot: Slot) -> _Index:
        """The slot's index, caught up with its tokens."""
        index, n_tokens = self._indices[slot.id], len(slot.tokens)
        if index is None or index.n_learnt > n_tokens:
            sizes = self._sizes.asked(slot)
            index = _Index(sizes, Occurrences((sizes.n,)))
            self._indices[slot.id] = index
        if index.n_learnt < n_tokens:
            index.seen.learn(slot.history)
            index.n_learnt = n_tokens
        return index

    def sizes(self, slot: Slot) -> Sizes:
        """The sizes in force for the slot's request."""
        return self.learn(slot).sizes

    def places(self, want: Want, n_read: int) -> NDArray[np.int32]:
        """Indices of what followed the n tokens before, newest first; none where there are too few.

        [at most max(n_read, min_hits)] int32. Places lie in the certain tokens, though what is looked up may end in
        provisional ones.
        """
        index = self.learn(want.slot)
        sizes = index.sizes
        places = index.seen.ends(want.slot.history, want.context(sizes.n), max(n_read, sizes.min_hits))
        return places if len(places) >= sizes.min_hits else places[:0]

    def links(self, slot: Slot) -> list[dict[int, int]]:
        """All the index of a slot knows: equal texts at equal sizes have equal links."""
        return self.learn(slot).seen.links()


def copied(want: Want, place: int, n: int) -> list[int]:
    """The `n` tokens from an index of the slot's tokens on.

    A copy that comes to the end of the text goes on into the provisional tokens and then into itself: the text is then
    a loop or a table row, and the loop goes on.
    """
    tokens = want.slot.tokens[place : place + n]
    tokens += want.after[: n - len(tokens)]
    while len(tokens) < n:
        tokens += tokens[: n - len(tokens)]
    return tokens
