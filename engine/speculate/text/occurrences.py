"""Where each run of a few fixed lengths was seen in a text, newest first: what the history drafters look up.

Chains of earlier places as in the LZ77 compressors (Ziv and Lempel 1977; zlib's deflate): a hash table holds the newest
place of each distinct run, and every place points at the place before it. Unlike zlib's, a chain holds the places of
one run only, because tokens are compared when a place is added; a look-up then compares once and follows the chain
without meeting other runs.

Hashes are polynomials of the tokens modulo 2^64, rolled along the text, then multiply-shift (Dietzfelbinger et al.
1997) for the bucket; collisions are resolved by comparing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.speculate.text.loops import compiled

_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial; odd, so that no token is ever shifted out
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_LEAST = 1024  # places a new index has room for
_SEED = 2**64 - 1

Tokens = NDArray[np.int32]
Table = NDArray[np.uint64]
Place = int | np.int64  # np.int64 where compiled code needs the type


class Occurrences:
    """Where each run of the given lengths ends in a text that grows at its end.

    A place is the index after a run, so that `tokens[place]` is what followed it there. The last run of a text is not
    indexed: nothing follows it yet, and a text's end never finds itself. The index holds no tokens: every method is
    given the text, which may be another array each time but must begin with what was learnt. Learning costs each
    token once and O(sum of lengths) per call; a look-up costs the run's length and the places returned. Memory is
    20 to 40 bytes per token and length.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths`: of the runs, ascending, each at least 1. Compiles what the methods use."""
        if not lengths or lengths[0] < 1 or any(a >= b for a, b in pairwise(lengths)):
            raise ValueError(f"run lengths must be positive and ascending, not {tuple(lengths)}")
        self.lengths = tuple(lengths)
        self._lengths = np.array(self.lengths, dtype=np.int64)  # [n_lengths]
        self.clear()
        _warm_up()

    def clear(self) -> None:
        """Forget everything and the memory with it."""
        self._n_seen = 0
        # Per length, by bucket: a run's hash in the upper half, its newest place in the lower; 0: free.
        self._newest = np.zeros((len(self.lengths), 2 * _LEAST), np.uint64)  # [n_lengths, 2 * n_room]
        # Per length, by place: the place before it of the same run; 0: none.
        self._before = np.zeros((len(self.lengths), _LEAST), np.int32)  # [n_lengths, n_room]

    def learn(self, tokens: NDArray[np.int32], start: int = 0, salt: int = 0) -> None:
        """Index every run that is followed by a known token and was not indexed yet; all of a text that was cut.

        `tokens` [n_tokens] int32 is the whole text so far. No run begins before `start`. Runs learnt under different
        salts are different runs, up to a collision of 64-bit hashes.
        """
        if len(tokens) < self._n_seen:
            self.clear()
        if len(tokens) > self._before.shape[1]:
            self._grow(len(tokens))
        where = (self._n_seen, start, np.uint64(salt & _SEED))
        _learn(tokens, self._lengths, where, self._newest, self._before)
        self._n_seen = len(tokens)

    def longest(
        self, tokens: NDArray[np.int32], context: NDArray[np.int32], limit: int, *, salt: int = 0
    ) -> tuple[int, NDArray[np.int32]]:
        """The greatest run length at which the context's end has places, and those places, newest first.

        `context` [n_context] int32 ends in the run that is looked for; places [at most limit] int32.
        (0, an empty array) if it has none at any length.
        """
        which = (limit, np.uint64(salt & _SEED))
        row, places = _longest(tokens, context, self._lengths, which, (self._newest, self._before))
        return (self.lengths[row] if row >= 0 else 0), places

    def walk(self, tokens: NDArray[np.int32], text: NDArray[np.int32]) -> int:
        """Write into `text` what followed its first run at the newest place, then what followed the run then last.

        So on to the end of `text` [length + n_most] int32, or to a run that has no place; returns how many tokens were
        written. For an index of one length.
        """
        return int(_walk(tokens, text, self.lengths[0], self._newest[0]))

    def _grow(self, n_tokens: int) -> None:
        n_room = 1 << (n_tokens - 1).bit_length()
        before = np.zeros((len(self.lengths), n_room), np.int32)
        before[:, : self._before.shape[1]] = self._before
        newest = np.zeros((len(self.lengths), 2 * n_room), np.uint64)
        _rehash(self._newest, newest)
        self._newest, self._before = newest, before


def _warm_up() -> None:
    """Compile, so that no request waits for it later; microseconds once it is done."""
    lengths = np.array((1,), dtype=np.int64)
    text = np.zeros(3, np.int32)
    newest, before = np.zeros((1, 8), np.uint64), np.zeros((1, 4), np.int32)
    _learn(text, lengths, (0, 0, np.uint64(0)), newest, before)
    _walk(text, text.copy(), 1, newest[0])
    _longest(text, text, lengths, (1, np.uint64(0)), (newest, before))
    _rehash(newest, np.zeros((1, 16), np.uint64))


@compiled
def _finish(value: np.uint64, salt: np.uint64) -> np.uint64:
    """A run's 32-bit hash from its polynomial."""
    mixed = value + salt * _MIX
    mixed = (mixed ^ (mixed >> _HALF)) * _MIX
    return (mixed ^ (mixed >> _HALF)) * _BASE >> _HALF


@compiled
def _polynomial(tokens: Tokens, start: Place, end: Place) -> np.uint64:
    value = np.uint64(0)
    for i in range(start, end):
        value = value * _BASE + np.uint64(tokens[i]) + _ONE
    return value


@compiled
def _bucket(tag: np.uint64, n_buckets: int) -> Place:
    """Where probing starts: the hash's upper bits. `n_buckets` is a power of two."""
    return np.int64(tag * np.uint64(n_buckets) >> _HALF)


@compiled
def _same(tokens: Tokens, end: Place, others: Tokens, other_end: Place, length: Place) -> bool:
    i = 1
    while i <= length and tokens[end - i] == others[other_end - i]:
        i += 1
    return bool(i > length)


@compiled
def _put(tokens: Tokens, end: int, tag: np.uint64, length: Place, newest: Table, before: Tokens) -> None:
    """Make `end` the newest place of its run. `newest` [n_buckets], `before` [n_room]."""
    n_buckets = len(newest)
    bucket = _bucket(tag, n_buckets)
    while newest[bucket] != 0:
        if newest[bucket] >> _HALF == tag:
            place = np.int64(newest[bucket] & _LOW)
            # Where the run one token back is known to be the same, one comparison is enough: a loop of 32k tokens
            # would else cost its length times the run's.
            if before[end - 1] == place - 1 and place > 1:
                same = tokens[end - 1] == tokens[place - 1]
            else:
                same = _same(tokens, end, tokens, place, length)
            if same:
                before[end] = place
                break
        bucket = (bucket + 1) & (n_buckets - 1)
    newest[bucket] = tag << _HALF | np.uint64(end)


@compiled
def _learn(
    tokens: Tokens,
    lengths: NDArray[np.int64],
    where: tuple[int, int, np.uint64],
    newest: Table,
    before: Tokens,
) -> None:
    n_seen, start, salt = where
    n_tokens = len(tokens)
    for row in range(len(lengths)):
        length = lengths[row]
        first = max(n_seen, start + length)
        if first >= n_tokens:
            continue
        leaving = _ONE  # what a token counts for when it leaves the run
        for _ in range(length):
            leaving *= _BASE
        value = _polynomial(tokens, first - length, first)
        for end in range(first, n_tokens):
            if end > first:
                value = value * _BASE + np.uint64(tokens[end - 1]) + _ONE
                value -= leaving * (np.uint64(tokens[end - 1 - length]) + _ONE)
            _put(tokens, end, _finish(value, salt), length, newest[row], before[row])


@compiled
def _find(tokens: Tokens, context: Tokens, length: Place, salt: np.uint64, newest: Table) -> Place:
    """The newest place of the context's last tokens, 0 if there is none."""
    if len(context) < length:
        return np.int64(0)
    n_buckets = len(newest)
    tag = _finish(_polynomial(context, len(context) - length, len(context)), salt)
    bucket = _bucket(tag, n_buckets)
    while newest[bucket] != 0:
        if newest[bucket] >> _HALF == tag:
            place = np.int64(newest[bucket] & _LOW)
            if _same(tokens, place, context, len(context), length):
                return place
        bucket = (bucket + 1) & (n_buckets - 1)
    return np.int64(0)


@compiled
def _follow(place: Place, limit: int, before: Tokens) -> Tokens:
    """A place and those before it: [at most limit] int32."""
    places = np.empty(limit, np.int32)
    n_places = 0
    while place > 0 and n_places < limit:
        places[n_places] = place
        n_places += 1
        place = before[place]
    return places[:n_places]


@compiled
def _longest(
    tokens: Tokens,
    context: Tokens,
    lengths: NDArray[np.int64],
    which: tuple[int, np.uint64],
    index: tuple[Table, Tokens],
) -> tuple[int, Tokens]:
    limit, salt = which
    newest, before = index
    for row in range(len(lengths) - 1, -1, -1):
        place = _find(tokens, context, lengths[row], salt, newest[row])
        if place > 0:
            return row, _follow(place, limit, before[row])
    return -1, np.empty(0, np.int32)


@compiled
def _walk(tokens: Tokens, text: Tokens, length: int, newest: Table) -> int:
    for i in range(length, len(text)):
        place = _find(tokens, text[:i], length, np.uint64(0), newest)
        if place == 0:
            return i - length
        text[i] = tokens[place]
    return len(text) - length


@compiled
def _rehash(old: Table, new: Table) -> None:
    """Carry the newest places over into a larger table; a run's hash is in its entry."""
    n_lengths, n_buckets = new.shape
    for row in range(n_lengths):
        for entry in old[row]:
            if entry != 0:
                bucket = _bucket(entry >> _HALF, n_buckets)
                while new[row, bucket] != 0:
                    bucket = (bucket + 1) & (n_buckets - 1)
                new[row, bucket] = entry
