"""What ngram-simple, the n-gram maps and ngram-mod share: finding a slot's last n tokens earlier in its text.

What followed there is the guess. The drafters differ in which occurrence they follow and in how far they copy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, TextDrafter, Want
from slipstream.engine.speculate.text.occurrences import Occurrences

Tokens = NDArray[np.int32]


class Sizes(NamedTuple):
    """Settings of a drafter that copies: the server's, or those in force for a request."""

    n: int  # tokens that must match
    m: int  # most tokens copied
    min_hits: int  # earlier occurrences a match must have


class Copying(TextDrafter):
    """Copies up to `size_m` tokens that followed the newest earlier occurrence of the last `size_n` tokens.

    There must be `min_hits` earlier occurrences. Requests may ask for other sizes.
    """

    n_read = 1  # occurrences that `_copy` is given, at most

    def __init__(self, size_n: int, size_m: int, min_hits: int, n_slots: int) -> None:
        """Compiles what it uses."""
        self._sizes = Sizes(size_n, size_m, min_hits)
        self._seen = [Occurrences((size_n,)) for _ in range(n_slots)]

    def begin(self, slot: Slot) -> None:
        self._seen[slot.id] = Occurrences((self.sizes(slot).n,))
        self._seen[slot.id].learn(slot.history)

    def end(self, slot: Slot) -> None:
        self._seen[slot.id].clear()

    def sizes(self, slot: Slot) -> Sizes:
        """The server's sizes, with what the slot's request asks for in their place."""
        speculate = slot.speculate
        asked = speculate.ngram_size_n, speculate.ngram_size_m, speculate.ngram_min_hits
        return Sizes(*(own if size is None else size for own, size in zip(self._sizes, asked, strict=True)))

    def guess(self, want: Want) -> Guess:
        text, seen, sizes = want.slot.history, self._seen[want.slot.id], self.sizes(want.slot)
        seen.learn(text)
        # What is looked up may end in provisional tokens; it is found among the certain tokens.
        _, places = seen.longest(text, want.context(sizes.n), max(self.n_read, sizes.min_hits))
        if len(places) < sizes.min_hits:
            return NO_GUESS
        return self._copy(want, places[: self.n_read], min(want.n_max, self._length(want)))

    def _length(self, want: Want) -> int:
        """Most tokens to copy."""
        return self.sizes(want.slot).m

    def _copy(self, want: Want, places: Tokens, n: int) -> Guess:
        """A guess of at most `n` tokens. places [1 to n_read] int32, newest first: where what followed begins."""
        return Guess(copied(want, int(places[0]), n))


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
