"""ngram-simple: the last n tokens looked up in the slot's own history; what followed them is the draft.

Source: llama.cpp's `ngram-simple` (most recent earlier occurrence wins). No model, no state to reset.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.slot import Slot
from engine.speculate.drafter import Draft, Drafter, Want


class NgramSimple(Drafter):
    """Copies up to `size_m` tokens that followed the latest earlier occurrence of the last `size_n` tokens."""

    name = "ngram-simple"

    def __init__(self, size_n: int, size_m: int, n_slots: int) -> None:
        self._size_n = size_n
        self._size_m = size_m
        # Where each n-gram last ended, per slot: n-gram bytes -> index after it. Fed as tokens are kept, so a
        # step costs its new tokens and not the whole context.
        self._ends: list[dict[bytes, int]] = [{} for _ in range(n_slots)]
        self._n_seen = [0] * n_slots

    def begin(self, slot: Slot) -> None:
        self._ends[slot.id] = {}
        self._n_seen[slot.id] = 0

    def end(self, slot: Slot) -> None:
        self.begin(slot)

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [Draft(self._copy(want)) for want in wants]

    def _copy(self, want: Want) -> Sequence[int]:
        tokens, n = want.slot.tokens, self._size_n
        self._learn(want.slot)
        if len(tokens) < n:
            return ()
        start = self._ends[want.slot.id].get(_key(tokens[-n:]))
        if start is None:
            return ()
        n_drafts = min(want.n_max, self._size_m)
        draft = tokens[start : start + n_drafts]
        # The match may end a few tokens back (a loop, a table row): then the copy goes on into itself.
        while len(draft) < n_drafts:
            draft += draft[: n_drafts - len(draft)]
        return draft

    def _learn(self, slot: Slot) -> None:
        """Index every n-gram that is followed by a known token and was not indexed yet."""
        n, ends = self._size_n, self._ends[slot.id]
        first = max(self._n_seen[slot.id], n)
        recent = _key(slot.tokens[first - n :])
        for i, end in enumerate(range(first, len(slot.tokens))):
            ends[recent[_WIDTH * i : _WIDTH * (i + n)]] = end
        self._n_seen[slot.id] = max(self._n_seen[slot.id], len(slot.tokens))


_WIDTH = 4  # bytes of a token in a key


def _key(ngram: Sequence[int]) -> bytes:
    return np.asarray(ngram, dtype=np.int32).tobytes()
