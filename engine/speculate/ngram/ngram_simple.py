"""ngram-simple: the last n tokens looked up in the slot's own text; what followed them is the draft.

Source: prompt lookup decoding (Saxena 2023) as llama.cpp's `ngram-simple` has it: the latest earlier occurrence wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, TextDrafter, Want
from slipstream.engine.speculate.ngram.lookup import NgramLookup, Sizes, copied


class NgramSimple(TextDrafter):
    """Copies up to `size_m` tokens that followed the latest earlier occurrence of the last `size_n` tokens.

    There must be `min_hits` earlier occurrences. Requests may ask for other sizes.
    """

    name = "ngram-simple"

    def __init__(self, size_n: int, size_m: int, min_hits: int, n_slots: int) -> None:
        """Compiles what it uses."""
        self._lookup = NgramLookup(Sizes(size_n, size_m, min_hits), n_slots)

    def begin(self, slot: Slot) -> None:
        self._lookup.begin(slot)

    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        return [self._guess(want) for want in wants]

    def end(self, slot: Slot) -> None:
        self._lookup.end(slot)

    def _guess(self, want: Want) -> Guess:
        places = self._lookup.places(want, 1)
        if len(places) == 0:
            return NO_GUESS
        n_most = min(want.n_max, self._lookup.sizes(want.slot).m)
        return Guess(copied(want, int(places[0]), n_most))
