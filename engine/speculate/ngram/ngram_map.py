"""ngram-map-k and ngram-map-k4v: copying after a match, with a memory per n-gram of how far copies held.

Source: llama.cpp's `ngram-map-k` and `ngram-map-k4v`, with three differences. The length drafted for an n-gram follows
a fading mean of the lengths accepted there, not the last length, so no single rejection retires an n-gram. Both
drafters honour `min_hits`. ngram-map-k4v copies what followed the continuation it chose, not what followed the match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, Kept, Want
from slipstream.engine.speculate.ngram.copying import Copying, Tokens, copied

_FADING = 0.5  # weight of the newest draft in the mean
_SHORTEST = 2  # a draft that fails costs little, and its success is how an n-gram comes back
_MOST_VALUES = 4  # continuations that are distinguished
_MAJORITY = 2  # occurrences of the chosen continuation per occurrence of any other
_TOKEN_BYTES = 4


class NgramMapK(Copying):
    """Copies after the newest earlier occurrence, as far as copies after that n-gram have held."""

    name = "ngram-map-k"

    def __init__(self, size_n: int, size_m: int, min_hits: int, n_slots: int) -> None:
        """Compiles what it uses."""
        super().__init__(size_n, size_m, min_hits, n_slots)
        self._held: list[dict[bytes, float]] = [{} for _ in range(n_slots)]  # n-gram -> mean accepted length

    def begin(self, slot: Slot) -> None:
        super().begin(slot)
        self._held[slot.id] = {}

    def end(self, slot: Slot) -> None:
        super().end(slot)
        self._held[slot.id] = {}

    def accept(self, kept: Sequence[Kept]) -> None:
        for one in kept:
            self._judge(one)

    def _length(self, want: Want) -> int:
        sizes = self.sizes(want.slot)
        held = self._held[want.slot.id].get(want.context(sizes.n).tobytes(), sizes.m)
        return min(sizes.m, max(_SHORTEST, round(held)))

    def _judge(self, kept: Kept) -> None:
        """Learn from what became of this drafter's tokens in a verified draft."""
        sizes, held = self.sizes(kept.slot), self._held[kept.slot.id]
        at, start = len(kept.slot.tokens) - kept.n_accepted - 1, 0
        for source, run in groupby(kept.draft.sources):
            n_drafted, n_held = len(list(run)), kept.n_accepted - start
            # Tokens behind a rejected token were not judged.
            if source == self.name and n_held >= 0:
                key = kept.slot.history[at + start - sizes.n : at + start].tobytes()
                mean = held.get(key, sizes.m)
                # A draft accepted whole might have gone on: that counts for twice its length and never against a key.
                length = n_held if n_held < n_drafted else max(mean, min(sizes.m, 2 * n_drafted))
                held[key] = mean + _FADING * (length - mean)
            start += n_drafted


@dataclass(slots=True)
class _Value:
    """A continuation, and how often it was seen."""

    follows: bytes  # its tokens, int32
    place: int  # where it was seen last
    n_seen: int = 1


class NgramMapK4V(NgramMapK):
    """Copies the continuation that most of the newest 64 earlier occurrences had, if it outweighs all others.

    Continuations are distinguished by their first `size_m` tokens, and the newest four count. A continuation that the
    end of the text cuts off counts for the newest that begins with it. A token's survival is the share of occurrences
    that have it too among those that went the same way before, shrunk as by one success and one failure more.
    """

    name = "ngram-map-k4v"
    n_read = 64

    def _copy(self, want: Want, places: Tokens, n: int) -> Guess:
        values = _values(want.slot.history, places, self.sizes(want.slot).m)
        best = max(values, key=lambda value: value.n_seen)
        if best.n_seen < _MAJORITY * (sum(value.n_seen for value in values) - best.n_seen):
            return NO_GUESS
        n_alike = [
            sum(value.n_seen for value in values if value.follows[:end] == best.follows[:end])
            for end in range(0, _TOKEN_BYTES * n + 1, _TOKEN_BYTES)
        ]
        survival = [(n_next + 1) / (n_same + 2) for n_same, n_next in pairwise(n_alike)]
        return Guess(copied(want, best.place, n), survival)


def _values(text: Tokens, places: Tokens, most: int) -> list[_Value]:
    """What followed the places, distinguished by `most` tokens; of equals the place is the newest that shows most."""
    values: list[_Value] = []
    for place in places.tolist():
        follows = text[place : place + most].tobytes()
        for value in values:
            if follows.startswith(value.follows) or value.follows.startswith(follows):
                value.n_seen += 1
                if len(follows) > len(value.follows):
                    value.follows, value.place = follows, place
                break
        else:
            if len(values) < _MOST_VALUES:
                values.append(_Value(follows, place))
    return values
