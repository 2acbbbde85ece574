"""scripted: knows the text to come and spoils a set share of it; for tests and benchmarks of known acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import Guess, TextDrafter, Want


class Scripted(TextDrafter):
    """Drafts `future(slot)`, what will follow the slot's tokens; each token is right with probability `rate`."""

    name = "scripted"

    def __init__(self, future: Callable[[Slot], Sequence[int]], rate: float, vocab_size: int) -> None:
        self._future = future
        self._rate = rate
        self._vocab_size = vocab_size

    def guess(self, want: Want) -> Guess:
        future = self._future(want.slot)[: want.n_max]
        return Guess([self._spoil(want.slot, i, token_id) for i, token_id in enumerate(future)])

    def _spoil(self, slot: Slot, index: int, token_id: int) -> int:
        """The same position is spoilt in every attempt, so a run can be repeated."""
        random = np.random.default_rng((slot.sampling.seed, len(slot.tokens) + index))
        return token_id if random.random() < self._rate else (token_id + 1) % self._vocab_size
