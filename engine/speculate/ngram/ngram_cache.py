"""ngram-cache: the likeliest follower of the last one to four tokens, by counts of the request's text and of files.

Source: lookup decoding (Saxena 2023) with the three tables and the thresholds of llama.cpp's `ngram-cache`. Unlike
there, a text is learnt across the borders of steps, and a request's counts end with it unless a file of dynamic counts
is asked for.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from slipstream.engine.errors import LoadError, SettingError
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, TextDrafter, Want
from slipstream.engine.speculate.ngram import count_file as ngram_file
from slipstream.engine.speculate.ngram.counts import LONGEST, NgramCounts, extend

log = logging.getLogger(__name__)

N_MOST = 8  # tokens of a draft
MOST_ROWS = 2**20  # of the dynamic table, for n-grams and followers: about 40 MiB
_STATIC_SIZE = 2  # tokens of the static table's n-grams

# Per source (context, dynamic, static): least total, least share in %, for n-grams of 1, 2, 3, 4 tokens; 0: not used.
# [3, 2, 4] int32
RULES = np.array(
    (
        ((2, 2, 1, 1), (66, 50, 50, 50)),
        ((4, 3, 2, 2), (75, 66, 66, 66)),
        ((0, 2, 0, 0), (0, 50, 0, 0)),
    ),
    dtype=np.int32,
)


class NgramCache(TextDrafter):
    """Drafts from counted n-grams: of the slot's own text, of requests that ended, and of a file of bigrams."""

    name = "ngram-cache"

    def __init__(
        self, n_slots: int, static: str | Path | None, dynamic: str | Path | None, vocab_size: int
    ) -> None:
        """`static`, `dynamic`: files; the dynamic file need not exist yet, and gets the counts of all requests.

        Compiles what it uses. Raises `LoadError` for a file that cannot be used.
        """
        self._context: list[NgramCounts | None] = [None] * n_slots
        self._n_learnt = [0] * n_slots
        self._static = NgramCounts() if static is None else _bigrams(static, vocab_size)
        self._path = None if dynamic is None else Path(dynamic).resolve()  # a link stays a link
        # Room for all it may ever hold: growing would stop all requests for as long as a pass or two takes.
        self._dynamic = NgramCounts(0 if dynamic is None else MOST_ROWS, MOST_ROWS)
        self._is_full = False
        if self._path is not None:
            self._open(self._path, vocab_size)
        self._text = np.empty(LONGEST + N_MOST, np.int32)  # context and draft of the guess being made
        self._survival = np.empty(N_MOST, np.float32)  # of its tokens

    def begin(self, slot: Slot) -> None:
        self._context[slot.id] = None
        self._learn(slot)

    def end(self, slot: Slot) -> None:
        if self._context[slot.id] is not None and self._path is not None:
            self._dynamic.learn(slot.history, 0)
            self._warn_once_if_full()
        self._context[slot.id] = None

    def save(self) -> None:
        """Write the dynamic counts to their file, if any. Raises `OSError`."""
        if self._path is not None:
            ngram_file.write(self._path, self._dynamic.records())

    def close(self) -> None:
        """Save, as the server stops. What cannot be saved is logged: no request is left that could be answered."""
        try:
            self.save()
        except OSError as error:
            log.error("counted n-grams are lost path=%s reason=%s", self._path, error.strerror)

    def _open(self, path: Path, vocab_size: int) -> None:
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise SettingError("lookup_cache_dynamic", path, "its folder cannot be written to")
        ngram_file.remove_parts(path)
        if not path.exists():
            return
        try:
            self._dynamic.add(*ngram_file.read(path, vocab_size))
            self._warn_once_if_full()
        except LoadError as error:
            if error.__cause__ is not None:  # not its content is wrong
                raise
            _put_aside(path, error)

    def _warn_once_if_full(self) -> None:
        if self._dynamic.n_refused and not self._is_full:
            self._is_full = True
            log.warning(
                "dynamic n-grams are full, new ones are left out path=%s most=%d", self._path, MOST_ROWS
            )

    def _learn(self, slot: Slot) -> NgramCounts:
        """The slot's counts, caught up with its tokens."""
        counts = self._context[slot.id]
        if counts is None or len(slot.tokens) < self._n_learnt[slot.id]:
            counts = self._context[slot.id] = NgramCounts(room=len(slot.tokens))
            self._n_learnt[slot.id] = 0
        counts.learn(slot.history, self._n_learnt[slot.id])
        self._n_learnt[slot.id] = len(slot.tokens)
        return counts

    def guess(self, want: Want) -> Guess:
        counts = self._learn(want.slot)
        context = want.context(LONGEST)
        self._text[: len(context)] = context
        sources = (counts.table, self._dynamic.table, self._static.table)
        survival = self._survival[: min(want.n_max, N_MOST)]
        n_drafted = extend(self._text, len(context), survival, sources, RULES)
        if n_drafted == 0:
            return NO_GUESS
        return Guess(
            self._text[len(context) : len(context) + n_drafted].tolist(), survival[:n_drafted].tolist()
        )


def _put_aside(path: Path, fault: LoadError) -> None:
    """Rename a file that cannot be used. Raises `LoadError` where that fails: a save would take its place."""
    try:
        aside = path.replace(f"{path}.damaged")
    except OSError as error:
        raise LoadError(f"{fault}; it cannot be put aside: {error.strerror}") from error
    log.warning("counted n-grams start anew: %s; the file is now %s", fault, aside)


def _bigrams(path: str | Path, vocab_size: int) -> NgramCounts:
    """The n-grams of two tokens in a file."""
    grams, followers = ngram_file.read(path, vocab_size)
    sizes = np.count_nonzero(grams >= 0, axis=1)  # [n_grams]
    followers = followers[sizes[followers[:, 0]] == _STATIC_SIZE]
    counts = NgramCounts(room=int(np.count_nonzero(sizes == _STATIC_SIZE)))
    counts.add(grams, followers)
    return counts
