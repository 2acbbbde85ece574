"""garbage: a drafter of random tokens. It shows that a bad drafter costs time and never changes the text; for tests."""

from __future__ import annotations

import numpy as np

from slipstream.engine.speculate.drafter import Guess, TextDrafter, Want


class Garbage(TextDrafter):
    """Draws drafts of random length and content, the same in every run."""

    name = "garbage"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def guess(self, want: Want) -> Guess:
        random = np.random.default_rng((len(want.slot.tokens), want.slot.sampling.seed))
        n_drafts = int(random.integers(0, want.n_max + 1))
        return Guess(random.integers(0, self._vocab_size, n_drafts).tolist())
