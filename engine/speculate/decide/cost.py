"""What a pass costs by its number of rows, and a draft by its length: measured, never modelled.

Both are step functions of the machine, so they are tables filled at start and refined while serving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

TIERS: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)

_WEIGHT = 0.1  # of a new measurement in a tier's average
_OUTLIER = 4.0  # a measurement this many times the average is a hiccup of the machine, not the pass


class _Seconds:
    """A running average that one hiccup does not move; two in a row are a machine that has become slower.

    Where the first measurement was a hiccup itself, the average falls at once to the next one.
    """

    def __init__(self, seconds: float) -> None:
        self.average = seconds
        self._hiccup = False

    def observe(self, seconds: float) -> None:
        is_far = seconds > _OUTLIER * self.average
        if (is_far and self._hiccup) or self.average > _OUTLIER * seconds:
            self.average = seconds
        elif not is_far:
            self.average += _WEIGHT * (seconds - self.average)
        self._hiccup = is_far and not self._hiccup


class PassCost:
    """Seconds of a target pass as a function of its rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, _Seconds] = {}
        self._table: tuple[list[int], list[float]] | None = None  # measured tiers, seconds that never fall

    def observe(self, n_rows: int, seconds: float) -> None:
        """Learn from one pass. Passes larger than the last tier are prompt work and say nothing here."""
        if n_rows > TIERS[-1]:
            return
        tier = TIERS[bisect_left(TIERS, n_rows)]
        if tier in self._seconds:
            self._seconds[tier].observe(seconds)
        else:
            self._seconds[tier] = _Seconds(seconds)
        self._table = None

    def __call__(self, n_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimated seconds for each number of rows; more rows never cost less.

        Linear between measured tiers, proportional beyond the last; 1 + 2 % a row before any measurement.
        """
        if not self._seconds:
            return np.asarray(1.0 + 0.02 * n_rows, np.float64)
        tiers, seconds = self._measured()
        beyond = np.maximum(1.0, n_rows / tiers[-1])
        return np.asarray(np.interp(n_rows, tiers, seconds) * beyond, np.float64)

    def at(self, n_rows: int) -> float:
        """The same for one number of rows; an array of one costs four times as much."""
        if not self._seconds:
            return 1.0 + 0.02 * n_rows
        tiers, seconds = self._measured()
        i = bisect_left(tiers, n_rows)
        if i == len(tiers):
            return seconds[-1] * n_rows / tiers[-1]
        if i == 0:
            return seconds[0]
        share = (n_rows - tiers[i - 1]) / (tiers[i] - tiers[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def _measured(self) -> tuple[list[int], list[float]]:
        if self._table is None:
            tiers = sorted(self._seconds)
            self._table = tiers, [*accumulate((self._seconds[tier].average for tier in tiers), max)]
        return self._table


class DraftCost:
    """Seconds a network takes per drafted position, all slots together; a free drafter per call for a slot."""

    def __init__(self) -> None:
        self._per_token: _Seconds | None = None

    def observe(self, depth: int, seconds: float) -> None:
        """Learn from one call that drafted `depth` positions at most."""
        each = seconds / depth
        if self._per_token is None:
            self._per_token = _Seconds(each)
        else:
            self._per_token.observe(each)

    def __call__(self, depth: int) -> float:
        return self._per_token.average * depth if self._per_token is not None else 0.0
