"""A draft on offer for a slot, with what it is worth."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens that could be verified, each with its author and its survival."""

    token_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    # Probability that a token is accepted together with all before it; never increasing.
    survival: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # [n_tokens]

    def __len__(self) -> int:
        return len(self.token_ids)

    def worth(self, price: float) -> float:
        """Expected tokens beyond what their rows cost, at `price` tokens a row."""
        return worth(self.survival, price)

    def followed_by(self, other: Offer) -> Offer:
        """This draft and, if all of it is accepted, the other."""
        if not self or not other:
            return self
        survival = np.concatenate((self.survival, self.survival[-1] * other.survival))
        return Offer(self.token_ids + other.token_ids, self.sources + other.sources, survival)


NO_OFFER = Offer()


def worth(survival: NDArray[np.float64], price: float) -> float:
    """Expected tokens of a draft beyond what their rows cost, at `price` tokens a row. survival: [n_tokens]."""
    return float(np.maximum(survival - price, 0.0).sum()) if len(survival) else 0.0
