"""ngram-mod: the token that followed the last n tokens, then the token that followed the n ending in it, and so on.

Source: llama.cpp's `ngram-mod`. There one hashed table serves all users, so that one user's text shows in another's
timing, and runs with one hash share an entry; here a slot's own text is searched, and runs are compared.
"""

from __future__ import annotations

import numpy as np

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, Want
from slipstream.engine.speculate.ngram.copying import Copying, Sizes, Tokens


class NgramMod(Copying):
    """Follows runs of `n_match` tokens to the newest token behind each; drafts of `n_min` to `n_max` tokens."""

    name = "ngram-mod"

    def __init__(self, n_match: int, n_min: int, n_max: int, n_slots: int) -> None:
        """Compiles what it uses."""
        super().__init__(n_match, n_max, 1, n_slots)
        self._n_min = n_min

    def sizes(self, slot: Slot) -> Sizes:
        """Always the server's: the sizes that a request may set are those of drafters that copy in one piece."""
        return self._sizes

    def _copy(self, want: Want, places: Tokens, n: int) -> Guess:
        text = np.empty(self._sizes.n + n, np.int32)  # [n_match + n]
        text[: self._sizes.n] = want.context(self._sizes.n)
        n_guessed = self._seen[want.slot.id].walk(want.slot.history, text)
        # The usual least length is above the usual --draft-max: a request that may draft less would never draft.
        if n_guessed < min(self._n_min, n):
            return NO_GUESS
        return Guess(text[self._sizes.n : self._sizes.n + n_guessed].tolist())
