"""How often each token followed each run of one to four tokens: the tables of lookup decoding.

Source: lookup decoding (Saxena 2023) as llama.cpp's `ngram-cache` has it.

A table is one hash index with open addressing over one dense array, so it grows in place and is read in order of
insertion. rows [room, 8] int32 holds n-grams and, for n-grams that had several followers, those followers:

    n-gram    four tokens, oldest first, -1 padded; total; best follower, its count; row of its newest follower, -1
    follower  -2, row of the n-gram, token, -1; count; not used, not used; row of the next older follower, -1

An n-gram with a single follower, which is the usual case, needs no row for it. Keys are compared by tokens, not by hash
alone. Counting touches one n-gram and one follower however many followers the n-gram has. Hashes are salted per
table, so that no text can be written to make n-grams collide.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.speculate.text.loops import compiled

LONGEST = 4  # tokens of the longest n-gram

_TOTAL, _BEST, _BEST_COUNT, _NEWEST = 4, 5, 6, 7  # columns of an n-gram after its tokens
_COUNT, _OLDER = 4, 7  # columns of a follower after its key
_OF, _TOKEN = 1, 2  # of its key
_N_ROWS, _N_REFUSED, _SALT = 0, 1, 2  # of sizes
_IS_FOLLOWER = np.int32(-2)
_PAD = np.int32(-1)
# Rows that one token adds at most: per length an n-gram, or a second follower and the first.
_N_ADDED = 3 * LONGEST
_LEAST = 256
_MOST_ROWS = 2**30
_MOST_COUNT = 2**30  # of a total; an n-gram that has it is counted no further
_MOST_WALKED = 64  # followers weighed against the static table, newest first
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)

Words = NDArray[np.int32]
Sizes = NDArray[np.int64]
Table = tuple[Words, Words, Sizes]  # index [n_buckets], rows [room, 8], sizes [3]
Int = int | np.integer[Any]  # an integer in compiled code
Key = tuple[Int, Int, Int, Int]

F = TypeVar("F", bound=Callable[..., object])


def _compiled(function: F) -> F:
    """Compile a function that makes no arrays.

    Without reference counts, which numba else keeps with atomic instructions for every array at every call, counting
    takes a fifth of the time. numba's own library uses the option.
    """
    made: F = compiled(function, _nrt=False)
    return made


class NgramCounts:
    """Counts of the followers of n-grams of 1 to 4 tokens, in one growing table.

    `most` bounds the rows; past it nothing new is added and `n_refused` rises. 40 to 50 bytes per row.
    """

    def __init__(self, room: int = 0, most: int = _MOST_ROWS) -> None:
        """`room`: rows to have room for at once. Compiles what the methods use."""
        self._most = most
        sizes = np.array((0, 0, secrets.randbits(63)), np.int64)
        self.table: Table = (*_empty(min(max(room, _LEAST), most)), sizes)
        _warm_up()

    @property
    def n_refused(self) -> int:
        """Followers that found no room."""
        return int(self.table[2][_N_REFUSED])

    def learn(self, tokens: NDArray[np.int32], first: int) -> None:
        """Count every token from index `first` on as a follower of the tokens before it. `tokens`: [n] int32."""
        self._count(lambda at: _learn(self.table, tokens, at, self._most), first, len(tokens))

    def records(self) -> tuple[Words, Words]:
        """All there is: n-grams and followers.

        N-grams [n_grams, 4] int32, -1 padded; followers [n_followers, 3] int32: row of the n-gram, token, count.
        """
        rows = self.table[1][: self.table[2][_N_ROWS]]
        is_gram = rows[:, 0] != _IS_FOLLOWER
        number = np.cumsum(is_gram, dtype=np.int32) - 1  # [n_rows]: of an n-gram among the n-grams
        single = np.flatnonzero(is_gram & (rows[:, _NEWEST] < 0))
        several = np.flatnonzero(~is_gram)
        singles = np.stack((number[single], rows[single, _BEST], rows[single, _BEST_COUNT]), axis=1)
        links = np.stack((number[rows[several, _OF]], rows[several, _TOKEN], rows[several, _COUNT]), axis=1)
        followers: Words = np.concatenate((singles, links)).astype(np.int32)
        return np.ascontiguousarray(rows[is_gram, :LONGEST]), followers

    def add(self, grams: Words, followers: Words) -> None:
        """Add counts given as `records` gives them, each at least 1."""
        self._count(lambda at: _add(self.table, (grams, followers), at, self._most), 0, len(followers))

    def _count(self, some: Callable[[int], Int], at: int, end: int) -> None:
        """Count from `at` to `end`, in as many goes as the table has to grow. some: counts until it is full."""
        while (at := int(some(at))) < end:
            self._grow()

    def _grow(self) -> None:
        _, old, sizes = self.table
        index, rows = _empty(min(2 * len(old) + _N_ADDED, self._most))
        n_rows = int(sizes[_N_ROWS])
        rows[:n_rows] = old[:n_rows]
        _enter_all(index, rows, sizes)
        self.table = (index, rows, sizes)


def extend(
    text: Words, n_text: int, survival: NDArray[np.float32], sources: tuple[Table, Table, Table], rules: Words
) -> int:
    """Write the likeliest tokens behind `text[:n_text]` until `survival` is full or no source votes; returns how many.

    text: [>= n_text + n_most] int32. survival: [n_most] float32, is given each token's share among the followers,
    shrunk as by one success and one failure more. sources: the context's, the dynamic and the static table.
    rules: [3, 2, 4] int32, per source the least total and the least share in % that an n-gram of 1 to 4 tokens must
    have; a least total of 0 leaves n-grams of that length out.

    Per token the context is asked before the dynamic table, longest n-gram first; of an n-gram's followers that with
    the greatest count times (100 times its count after the bigram in the static table, or 1) is taken if its share
    suffices; of more than 64 followers the newest 64 are weighed so. The static table's bigram comes last.
    """
    return int(_extend(text, n_text, survival, sources, rules))


def _empty(room: int) -> tuple[Words, Words]:
    """An index, at most half full when there is no more room, and rows of no meaning yet."""
    return np.full(1 << (2 * room - 1).bit_length(), -1, np.int32), np.empty((room, 8), np.int32)


def _warm_up() -> None:
    """Compile, so that no request waits for it later; microseconds once it is done."""
    sizes = np.zeros(3, np.int64)
    table = (*_empty(4), sizes)
    text = np.zeros(2, np.int32)
    _learn(table, text, 2, 4)
    _add(table, (np.zeros((1, LONGEST), np.int32), np.ones((1, 3), np.int32)), 1, 4)
    _enter_all(table[0], table[1], sizes)
    _extend(text, 1, np.zeros(1, np.float32), (table, table, table), np.ones((3, 2, 4), np.int32))


@_compiled
def _gram(tokens: Words, end: Int, n: Int) -> Key:
    """The `n` tokens before `end`, padded."""
    start = end - n
    second = tokens[start + 1] if n > 1 else _PAD
    third = tokens[start + 2] if n > 2 else _PAD
    fourth = tokens[start + 3] if n > 3 else _PAD
    return np.int32(tokens[start]), second, third, fourth


@_compiled
def _mix(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> _HALF)) * _MIX
    return value ^ (value >> _HALF)


@_compiled
def _bucket(index: Words, rows: Words, sizes: Sizes, key: Key) -> np.int64:
    """Where the key stands in the index, or the free place for it."""
    one, two, three, four = key
    low = (np.uint64(two) << _HALF) | (np.uint64(one) & _LOW)
    high = (np.uint64(four) << _HALF) | (np.uint64(three) & _LOW)
    last = len(index) - 1
    at = np.int64(_mix(_mix(_mix(low ^ np.uint64(sizes[_SALT])) ^ high)) & np.uint64(last))
    while index[at] >= 0:
        row = index[at]
        if rows[row, 0] == one and rows[row, 1] == two and rows[row, 2] == three and rows[row, 3] == four:
            break
        at = (at + 1) & last
    return at


@_compiled
def _row(index: Words, rows: Words, sizes: Sizes, key: Key) -> np.int64:
    """The key's row, new if it has none; -1 if there is no room."""
    at = _bucket(index, rows, sizes, key)
    row = np.int64(index[at])
    if row < 0 and sizes[_N_ROWS] < len(rows):
        row = sizes[_N_ROWS]
        sizes[_N_ROWS] = row + 1
        index[at] = row
        rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3] = key
        rows[row, 4], rows[row, 5], rows[row, 6], rows[row, 7] = 0, -1, 0, -1
    return row


@_compiled
def _count_several(index: Words, rows: Words, sizes: Sizes, gram: Int, token: Int, count: Int) -> Int:
    """Add to a follower of an n-gram that has several; its count, 0 if there is no room."""
    n_before = sizes[_N_ROWS]
    row = _row(index, rows, sizes, (_IS_FOLLOWER, np.int32(gram), np.int32(token), _PAD))
    if row < 0:
        return np.int64(0)
    if sizes[_N_ROWS] > n_before:
        rows[row, _OLDER] = rows[gram, _NEWEST]
        rows[gram, _NEWEST] = row
    rows[row, _COUNT] += count
    return np.int64(rows[row, _COUNT])


@_compiled
def _count(index: Words, rows: Words, sizes: Sizes, key: Key, token: Int, count: Int) -> None:
    """Add to a follower of an n-gram. Of followers with equal counts the last counted is the best."""
    gram = _row(index, rows, sizes, key)
    if gram < 0:
        sizes[_N_REFUSED] += 1
        return
    if rows[gram, _TOTAL] > _MOST_COUNT - count:
        return
    n_counted = np.int64(rows[gram, _BEST_COUNT]) + count
    if rows[gram, _NEWEST] >= 0 or (rows[gram, _BEST] != token and rows[gram, _TOTAL] > 0):
        if rows[gram, _NEWEST] < 0:
            _count_several(index, rows, sizes, gram, rows[gram, _BEST], rows[gram, _BEST_COUNT])
        n_counted = np.int64(_count_several(index, rows, sizes, gram, token, count))
        if n_counted == 0:
            sizes[_N_REFUSED] += 1
            return
    rows[gram, _TOTAL] += count
    if n_counted >= rows[gram, _BEST_COUNT]:
        rows[gram, _BEST], rows[gram, _BEST_COUNT] = token, n_counted


@_compiled
def _learn(table: Table, tokens: Words, first: Int, most: Int) -> Int:
    """Count followers from index `first` on; the index to go on from, short of the end if the table must grow."""
    index, rows, sizes = table
    for i in range(first, len(tokens)):
        if sizes[_N_ROWS] + _N_ADDED > len(rows) and len(rows) < most:
            return i
        for n in range(1, min(LONGEST, i) + 1):
            _count(index, rows, sizes, _gram(tokens, i, n), tokens[i], 1)
    return len(tokens)


@_compiled
def _add(table: Table, records: tuple[Words, Words], first: Int, most: Int) -> Int:
    """Add followers from index `first` on; the index to go on from, short of the end if the table must grow."""
    index, rows, sizes = table
    grams, followers = records
    for i in range(first, len(followers)):
        if sizes[_N_ROWS] + _N_ADDED > len(rows) and len(rows) < most:
            return i
        gram = grams[followers[i, 0]]
        key = (gram[0], gram[1], gram[2], gram[3])
        _count(index, rows, sizes, key, followers[i, 1], followers[i, 2])
    return len(followers)


@_compiled
def _enter_all(index: Words, rows: Words, sizes: Sizes) -> None:
    """Enter all rows into an empty index."""
    for row in range(sizes[_N_ROWS]):
        key = (rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3])
        index[_bucket(index, rows, sizes, key)] = row


@_compiled
def _find(table: Table, key: Key) -> np.int64:
    """The key's row or -1."""
    index, rows, sizes = table
    return np.int64(index[_bucket(index, rows, sizes, key)])


@_compiled
def _count_of(table: Table, gram: Int, token: Int) -> np.int64:
    """How often a token followed the n-gram in a row."""
    rows = table[1]
    if rows[gram, _NEWEST] < 0:
        return np.int64(rows[gram, _BEST_COUNT]) if rows[gram, _BEST] == token else np.int64(0)
    row = _find(table, (_IS_FOLLOWER, np.int32(gram), np.int32(token), _PAD))
    return np.int64(rows[row, _COUNT]) if row >= 0 else np.int64(0)


@_compiled
def _favoured(table: Table, gram: Int, static: Table, static_gram: Int) -> tuple[np.int64, np.int64]:
    """Of an n-gram's several followers that with the greatest product of counts, and its own count."""
    rows = table[1]
    best, best_count, best_score = np.int64(-1), np.int64(0), np.int64(0)
    row = np.int64(rows[gram, _NEWEST])
    for _ in range(_MOST_WALKED):
        if row < 0:
            break
        count = np.int64(rows[row, _COUNT])
        # Kept small, so that the product stays below 2^63; such counts do not differ by accident.
        known = min(_count_of(static, static_gram, rows[row, _TOKEN]), np.int64(2**24))
        score = count * max(np.int64(1), 100 * known)
        if score > best_score:
            best, best_count, best_score = np.int64(rows[row, _TOKEN]), count, score
        row = np.int64(rows[row, _OLDER])
    return best, best_count


@_compiled
def _vote(
    table: Table, key: Key, static: Table, static_gram: Int, rule: tuple[Int, Int]
) -> tuple[Int, Int, Int]:
    """The follower that an n-gram votes for, or -1; its count and the n-gram's total."""
    rows = table[1]
    least, share = rule
    gram = _find(table, key)
    if gram < 0:
        return np.int64(-1), np.int64(0), np.int64(0)
    total = np.int64(rows[gram, _TOTAL])
    best, count = np.int64(rows[gram, _BEST]), np.int64(rows[gram, _BEST_COUNT])
    # Where the most frequent follower's share is too small, no other's is large enough.
    if total >= least and 100 * count >= share * total and static_gram >= 0 and rows[gram, _NEWEST] >= 0:
        best, count = _favoured(table, gram, static, static_gram)
    if total < least or 100 * count < share * total:
        return np.int64(-1), np.int64(0), np.int64(0)
    return best, count, total


@_compiled
def _next(
    text: Words, n_text: Int, sources: tuple[Table, Table, Table], rules: Words
) -> tuple[Int, Int, Int]:
    """The first source's vote on the token after `text[:n_text]`, longest n-gram first; see `extend`."""
    static = sources[2]
    static_gram: Int = np.int64(-1)
    if n_text >= 2 and static[2][_N_ROWS] > 0:
        static_gram = _find(static, _gram(text, n_text, 2))
    for source in range(3):
        if sources[source][2][_N_ROWS] == 0:
            continue
        for n in range(min(LONGEST, n_text), 0, -1):
            rule = (rules[source, 0, n - 1], rules[source, 1, n - 1])
            if rule[0] > 0:
                favour = static_gram if source < 2 else np.int64(-1)
                found = _vote(sources[source], _gram(text, n_text, n), static, favour, rule)
                if found[0] >= 0:
                    return found
    return np.int64(-1), np.int64(0), np.int64(0)


@_compiled
def _extend(
    text: Words, n_text: Int, survival: NDArray[np.float32], sources: tuple[Table, Table, Table], rules: Words
) -> Int:
    for i in range(len(survival)):
        token, count, total = _next(text, n_text + i, sources, rules)
        if token < 0:
            return i
        text[n_text + i] = token
        survival[i] = np.float32(count + 1) / np.float32(total + 2)
    return len(survival)
