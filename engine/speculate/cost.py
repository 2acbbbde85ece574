"""What a pass costs by its number of rows, and a draft by its length: measured, never modelled.

Both are step functions of the machine, so they are tables filled at start and refined while serving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

TIERS: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)

_WEIGHT = 0.1  # of a new measurement in a tier's average
_OUTLIER = 4.0  # a measurement this many times the average is a hiccup of the machine, not the pass


class PassCost:
    """Seconds of a target pass as a function of its rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, n_rows: int, seconds: float) -> None:
        """Learn from one pass. Passes larger than the last tier are prompt work and say nothing here."""
        if n_rows > TIERS[-1]:
            return
        tier = TIERS[bisect_left(TIERS, n_rows)]
        old = self._seconds.get(tier)
        if old is None:
            self._seconds[tier] = seconds
        elif seconds < _OUTLIER * old:
            self._seconds[tier] = old + _WEIGHT * (seconds - old)

    def __call__(self, n_rows: float) -> float:
        """Estimated seconds for `n_rows`, linear between measured tiers; 1 + 2 % a row before any measurement."""
        known = sorted(self._seconds.items())
        if not known:
            return 1.0 + 0.02 * n_rows
        for (x0, y0), (x1, y1) in pairwise(known):
            if n_rows <= x1:
                return max(y0, y0 + (y1 - y0) * (n_rows - x0) / (x1 - x0)) if n_rows >= x0 else y0
        x1, y1 = known[-1]
        return y1 * max(1.0, n_rows / x1)


class DraftCost:
    """Seconds a drafter takes per drafted position (all slots together) and per call."""

    def __init__(self) -> None:
        self._per_token: float = 0.0
        self._seen = False

    def observe(self, depth: int, seconds: float) -> None:
        """Learn from one call that drafted `depth` positions at most."""
        each = seconds / depth
        if not self._seen:
            self._per_token, self._seen = each, True
        elif each < _OUTLIER * self._per_token:
            self._per_token += _WEIGHT * (each - self._per_token)

    def __call__(self, depth: int) -> float:
        return self._per_token * depth
