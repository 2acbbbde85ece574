"""ngram-mod: a small hashed table from the last n tokens to the next one, followed from token to token.

Source: llama.cpp's `ngram-mod`. There one table serves all users, so that one user's text shows in another's timing;
here each slot has its own for as long as its request lasts. No key is stored: two runs with one hash share an entry
and the later text wins, which makes a guess wrong and nothing else.

The hash is a polynomial of the n tokens modulo 2^64, rolled along the text, then multiply-shift (Dietzfelbinger et al.
1997) for the entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, TextDrafter, Want
from slipstream.engine.speculate.text.loops import compiled

_LEAST_SIZE = 4096
_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial; odd, so that no token is ever shifted out
_MIX = np.uint64(0xD6E8FEB86659FD93)
_ONE = np.uint64(1)
_HALF = np.uint64(32)
_FREE = np.int32(-1)

Tokens = NDArray[np.int32]


class NgramMod(TextDrafter):
    """Follows a table of hashed runs of `n_match` tokens; drafts of `n_min` to `n_max` tokens."""

    name = "ngram-mod"

    def __init__(self, n_match: int, n_min: int, n_max: int, n_slots: int, n_ctx: int) -> None:
        """`n_ctx`: most tokens of a sequence; a table has at least twice as many entries. Compiles what it uses."""
        self._n_match = n_match
        self._n_min = n_min
        self._n_max = n_max
        self._size = max(_LEAST_SIZE, 1 << (2 * n_ctx - 1).bit_length())
        self._next: list[Tokens | None] = [None] * n_slots  # [size] each
        self._n_learnt = [0] * n_slots
        text = np.zeros(2, np.int32)
        table = np.zeros(2, np.int32)
        _learn(table, text, 1, 0)
        _follow(table, text, 1)

    def begin(self, slot: Slot) -> None:
        self._next[slot.id] = None
        self._learn(slot)

    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        return [self._guess(want) for want in wants]

    def end(self, slot: Slot) -> None:
        self._next[slot.id] = None

    def _learn(self, slot: Slot) -> Tokens:
        """The slot's table, caught up with its tokens."""
        table, n_tokens = self._next[slot.id], len(slot.tokens)
        if table is None or self._n_learnt[slot.id] > n_tokens:
            table = np.full(self._size, _FREE)
            self._next[slot.id] = table
            self._n_learnt[slot.id] = 0
        if self._n_learnt[slot.id] < n_tokens:
            _learn(table, slot.history, self._n_match, self._n_learnt[slot.id])
            self._n_learnt[slot.id] = n_tokens
        return table

    def _guess(self, want: Want) -> Guess:
        table = self._learn(want.slot)
        n_most = min(self._n_max, want.n_max)
        # The usual least length is above the usual --draft-max: a request that may draft less would never draft.
        n_least = min(self._n_min, n_most)
        context = want.context(self._n_match)
        if len(context) < self._n_match or n_most == 0:
            return NO_GUESS
        text = np.empty(self._n_match + n_most, np.int32)
        text[: self._n_match] = context
        n_guessed = int(_follow(table, text, self._n_match))
        if n_guessed < max(1, n_least):
            return NO_GUESS
        return Guess(text[self._n_match : self._n_match + n_guessed].tolist())


@compiled
def _entry(value: np.uint64, size: int) -> np.int64:
    """The entry of a polynomial's value in a table whose size is a power of two up to 2^32."""
    mixed = ((value ^ (value >> _HALF)) * _MIX) >> _HALF
    return np.int64((mixed * np.uint64(size)) >> _HALF)


@compiled
def _polynomial(tokens: Tokens, start: int, end: int) -> np.uint64:
    value = np.uint64(0)
    for i in range(start, end):
        value = value * _BASE + np.uint64(tokens[i]) + _ONE
    return value


@compiled
def _leaving(n_match: int) -> np.uint64:
    """What a token of a polynomial counts for one token after it was the oldest."""
    factor = _ONE
    for _ in range(n_match):
        factor *= _BASE
    return factor


@compiled
def _learn(table: Tokens, tokens: Tokens, n_match: int, n_learnt: int) -> None:
    """Enter every token from index `n_learnt` on that has `n_match` tokens before it. table: [size], tokens: [n]."""
    first = max(n_match, n_learnt)
    if first >= len(tokens):
        return
    leaving = _leaving(n_match)
    value = _polynomial(tokens, first - n_match, first)
    for i in range(first, len(tokens)):
        table[_entry(value, len(table))] = tokens[i]
        value = value * _BASE + np.uint64(tokens[i]) + _ONE
        value -= leaving * (np.uint64(tokens[i - n_match]) + _ONE)


@compiled
def _follow(table: Tokens, text: Tokens, n_match: int) -> int:
    """Fill `text` [n_match + n_most] from index `n_match` on until an entry is free; how many tokens were put."""
    leaving = _leaving(n_match)
    value = _polynomial(text, 0, n_match)
    for i in range(n_match, len(text)):
        token = table[_entry(value, len(table))]
        if token < 0:
            return i - n_match
        text[i] = token
        value = value * _BASE + np.uint64(token) + _ONE
        value -= leaving * (np.uint64(text[i - n_match]) + _ONE)
    return len(text) - n_match
