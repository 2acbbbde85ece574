"""synthetic: a drafter that always guesses as many tokens as may be verified; for benchmarks of chosen acceptance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.speculate.drafter import Guess, TextDrafter, Want

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MASK = 2**64 - 1


class Synthetic(TextDrafter):
    """Guesses that depend on the request's seed and the position only, and never end a text."""

    name = "synthetic"

    def __init__(self, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """Raises `ValueError` if every token of the vocabulary ends a text."""
        words = [i for i in range(vocab_size) if i not in eos_ids]
        if not words:
            raise ValueError(f"all {vocab_size} tokens end a text")
        self._words = np.array(words, dtype=np.int32)  # [n_words]

    def guess(self, want: Want) -> Guess:
        positions = np.arange(want.n_tokens, want.n_tokens + want.n_max, dtype=np.uint64)
        numbers = _random(want.slot.sampling.seed, positions)
        return Guess(self._words[numbers % np.uint64(len(self._words))].tolist())


def _random(seed: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood 2014) of seed and position: [n] uint64."""
    key = _mixed(np.array([seed & _MASK], np.uint64))
    return _mixed(key + positions * _STEP)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX[0]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX[1]
    return numbers ^ (numbers >> np.uint64(31))
