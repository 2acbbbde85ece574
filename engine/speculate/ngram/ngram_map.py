"""ngram-map-k and ngram-map-k4v: copying after a match, with a memory per n-gram of how far copies held.

Source: llama.cpp's `ngram-map-k` and `ngram-map-k4v`, with three differences. The length drafted for an n-gram follows
a fading mean of the lengths accepted there instead of the last one, so no single rejection retires an n-gram. Both
drafters honour `min_hits`. ngram-map-k4v copies what followed the continuation it chose, not what followed the match.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, Kept, TextDrafter, Want
from slipstream.engine.speculate.ngram.lookup import NgramLookup, Sizes, copied
from slipstream.engine.speculate.text.loops import compiled

_FADING = 0.5  # weight of the newest draft in the mean
_SHORTEST = 2  # a draft that fails costs little, and its success is how an n-gram comes back
_MOST_READ = 64  # occurrences compared by ngram-map-k4v
_MOST_VALUES = 4  # continuations told apart
_MAJORITY = 2  # occurrences of the chosen one for each of all others

Tokens = NDArray[np.int32]


class NgramMap(TextDrafter):
    """Copies after earlier occurrences of the last `size_n` tokens, as far as copies after that n-gram have held.

    At most `size_m` tokens, after at least `min_hits` earlier occurrences. Requests may ask for other sizes.
    """

    _n_read: int  # occurrences looked at, at most

    def __init__(self, size_n: int, size_m: int, min_hits: int, n_slots: int) -> None:
        """Compiles what it uses."""
        self._lookup = NgramLookup(Sizes(size_n, size_m, min_hits), n_slots)
        self._held: list[dict[bytes, float]] = [{} for _ in range(n_slots)]  # n-gram -> mean accepted length

    def begin(self, slot: Slot) -> None:
        self._held[slot.id] = {}
        self._lookup.begin(slot)

    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        return [self._guess(want) for want in wants]

    def accept(self, kept: Sequence[Kept]) -> None:
        for one in kept:
            self._judge(one)

    def end(self, slot: Slot) -> None:
        self._held[slot.id] = {}
        self._lookup.end(slot)

    @abstractmethod
    def _copy(self, want: Want, places: Tokens, n: int) -> Guess:
        """A guess of `n` tokens after one of the places [n_places], newest first; or none."""

    def _guess(self, want: Want) -> Guess:
        places = self._lookup.places(want, self._n_read)
        if len(places) == 0:
            return NO_GUESS
        sizes = self._lookup.sizes(want.slot)
        held = self._held[want.slot.id].get(_key(want.context(sizes.n)), sizes.m)
        return self._copy(want, places, min(want.n_max, sizes.m, max(_SHORTEST, round(held))))

    def _judge(self, kept: Kept) -> None:
        """Learn from what became of the own tokens in a verified draft."""
        sizes, held = self._lookup.sizes(kept.slot), self._held[kept.slot.id]
        n_before = len(kept.slot.tokens) - kept.n_accepted - 1
        for start, n_drafted in _runs(kept.draft.sources, self.name):
            # Nothing is known of tokens behind a rejected one.
            if start > kept.n_accepted:
                return
            key = _key(kept.slot.history[n_before + start - sizes.n : n_before + start])
            mean = held.get(key, sizes.m)
            n_held = min(kept.n_accepted - start, n_drafted)
            # A draft accepted whole might have gone on: that counts for twice its length and never against a key.
            length = n_held if n_held < n_drafted else max(mean, min(sizes.m, 2 * n_drafted))
            held[key] = mean + _FADING * (length - mean)


class NgramMapK(NgramMap):
    """Copies what followed the newest earlier occurrence."""

    name = "ngram-map-k"
    _n_read = 1

    def _copy(self, want: Want, places: Tokens, n: int) -> Guess:
        return Guess(copied(want, int(places[0]), n))


class NgramMapK4V(NgramMap):
    """Copies the continuation that most of the newest 64 earlier occurrences had, if it outweighs all others.

    Continuations are told apart by their first `size_m` tokens, and the newest four count. One that the end of the
    text cuts off counts for the newest one that begins with it.
    """

    name = "ngram-map-k4v"
    _n_read = _MOST_READ

    def __init__(self, size_n: int, size_m: int, min_hits: int, n_slots: int) -> None:
        """Compiles what it uses."""
        super().__init__(size_n, size_m, min_hits, n_slots)
        text = np.zeros(3, np.int32)
        _weigh(text, text[:1], 1, np.zeros(1, np.float32))

    def _copy(self, want: Want, places: Tokens, n: int) -> Guess:
        size_m = self._lookup.sizes(want.slot).m
        survival = np.empty(n, np.float32)
        place = int(_weigh(want.slot.history, places[:_MOST_READ], size_m, survival))
        return NO_GUESS if place < 0 else Guess(copied(want, place, n), survival.tolist())


def _key(ngram: Tokens) -> bytes:
    """16 bytes however long the n-gram is. [n] int32."""
    return hashlib.blake2b(ngram.tobytes(), digest_size=16).digest()


def _runs(sources: Sequence[str], name: str) -> Iterator[tuple[int, int]]:
    """Start and length of each run of a drafter's tokens."""
    start = 0
    for source, run in groupby(sources):
        n_tokens = len(list(run))
        if source == name:
            yield start, n_tokens
        start += n_tokens


@compiled
def _common(tokens: Tokens, one: int, other: int, most: int) -> int:
    """How many tokens from two places on are equal, `most` at most and up to the end of the text."""
    most = min(most, len(tokens) - max(one, other))
    n = 0
    while n < most and tokens[one + n] == tokens[other + n]:
        n += 1
    return n


@compiled
def _group(tokens: Tokens, places: Tokens, most: int, values: Tokens, counts: Tokens) -> int:
    """Count places by the `most` tokens that follow; the number of values. values, counts: [4] int32.

    A value's place is the newest that shows it whole, or else shows most of it.
    """
    n_values = 0
    for place in places:
        known = min(most, len(tokens) - place)
        i = 0
        while i < n_values:
            shown = min(most, len(tokens) - values[i])
            if _common(tokens, place, values[i], most) == min(known, shown):
                break
            i += 1
        if i < n_values:
            counts[i] += 1
            if known > min(most, len(tokens) - values[i]):
                values[i] = place
        elif n_values < len(values):
            values[i], counts[i] = place, 1
            n_values += 1
    return n_values


@compiled
def _weigh(tokens: Tokens, places: Tokens, most: int, survival: NDArray[np.float32]) -> np.int64:
    """The place of the continuation that outweighs all others, -1 if none does.

    survival [n_drafted] is given, per token, the share of occurrences that have it too among those that went the same
    way before, shrunk as by one success and one failure more.
    """
    values, counts = np.empty(_MOST_VALUES, np.int32), np.empty(_MOST_VALUES, np.int32)
    n_values = _group(tokens, places, most, values, counts)
    best = np.argmax(counts[:n_values])
    if counts[best] < _MAJORITY * (counts[:n_values].sum() - counts[best]):
        return np.int64(-1)
    parting = np.empty(n_values, np.int64)  # where each value first differs from the best
    for i in range(n_values):
        parting[i] = len(survival) if i == best else _common(tokens, values[i], values[best], most)
    for at in range(len(survival)):
        n_same, n_next = 0, 0
        for i in range(n_values):
            n_same += counts[i] if parting[i] >= at else 0
            n_next += counts[i] if parting[i] > at else 0
        survival[at] = (n_next + 1) / (n_same + 2)
    return np.int64(values[best])
