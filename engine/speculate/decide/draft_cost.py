"""What a drafter's call costs: a Kalman filter of what the call, a position that it guesses and a row fed before cost.

A call measures the sum of the three, so the filter says how much of a surprise is owed to which. As for passes, one
call far from what was expected is a hiccup, and two in a row are a change.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Seconds = tuple[float, float, float]  # of a call, a position and a row fed

# Shares of a pass of one row: what is assumed where nothing is known of a drafter.
ASSUMED: Seconds = (0.02, 0.1, 0.002)
_UNKNOWN = 3.0  # standard deviation of a cost that nothing is known of, beside the cost
_STEP = 0.05  # by which a cost moves from one call to the next
_NOISE = 0.2  # standard deviation of a call's seconds, beside those expected
_HICCUP = 3.0  # times too long or too short, and
_ODD = 4.0  # standard deviations from what was expected
_MOST = 9.0  # believed of one change
_WEIGHT = 1 / 64  # of a cost in what is usual
_LEAST = 0.1  # of what it was: no cost falls further by one call
_LEAST_S = 1e-9  # and none falls below: a drafter may take as long for one position as for sixteen


def scaled(costs: Seconds, factor: float) -> Seconds:
    """Each of the three times the factor."""
    call, position, row = costs
    return call * factor, position * factor, row * factor


class DraftCost:
    """What a drafter costs, at the pace of the start.

    `recent`: as measured lately; `usual`: the same, moving slowly. Both are read in every pass, often, and plain floats
    are read quickly; measurements are rarer.
    """

    def __init__(self, pass_s: float, at: float) -> None:
        """pass_s: seconds of a pass of one row; at: seconds of work until now."""
        self.recent = self.usual = scaled(ASSUMED, pass_s)
        self._recent = self._usual = np.array(self.recent)  # [3] each, the same
        self.at = at  # when it was last measured
        self.n_measured = 0  # since the last doubt
        self.last = 1, 0  # the last call: positions, rows
        self.n_calls = 0  # that were measured
        self._far: float | None = None  # the measurement before, if that was a hiccup
        self._covariance = np.zeros((3, 3))
        self.doubt()

    def doubt(self) -> None:
        """What was measured may be wrong."""
        self.n_measured = 0
        self._covariance = np.diag((_UNKNOWN * self._recent) ** 2)

    def measure(self, n_positions: int, n_fed: int, seconds: float, at: float) -> None:
        """Learn from a call."""
        self.last = n_positions, n_fed
        call = np.array([1.0, n_positions, n_fed])
        before, self._far = self._far, None
        expected = float(call @ self._recent)
        ratio = seconds / expected
        if self.n_measured and not 1 / _HICCUP < ratio < _HICCUP and self._is_odd(call, seconds - expected):
            if before is None or (before > 1.0) != (ratio > 1.0):
                self._far = ratio
                return
            ratio = min(ratio, before, _MOST) if ratio > 1.0 else max(ratio, before, 1 / _MOST)
            self._recent = ratio * self._recent
            self.doubt()
        self._correct(call, seconds)
        self.n_calls += 1
        self._usual = self._usual * (self._recent / self._usual) ** max(_WEIGHT, 1 / self.n_calls)
        self.n_measured += 1
        self.at = at
        self.recent, self.usual = _seconds(self._recent), _seconds(self._usual)

    def expected(self, n_positions: int, n_fed: int) -> tuple[float, float]:
        """Seconds of a call by what was measured lately, and their standard deviation."""
        call = np.array([1.0, n_positions, n_fed])
        return float(call @ self._recent), sqrt(call @ self._covariance @ call)

    def _is_odd(self, call: Floats, surprise: float) -> bool:
        """Whether so much of a surprise is more than what is not known yet of the costs."""
        return surprise**2 > _ODD**2 * float(call @ self._covariance @ call)

    def _correct(self, call: Floats, seconds: float) -> None:
        covariance = self._covariance
        covariance.flat[::4] += (_STEP * self._recent) ** 2  # the diagonal
        expected = float(call @ self._recent)
        column = covariance @ call  # [3]
        variance = float(call @ column) + (_NOISE * max(seconds, expected)) ** 2
        corrected = self._recent + column * ((seconds - expected) / variance)
        self._recent = np.maximum(np.maximum(_LEAST * self._recent, corrected), _LEAST_S)
        covariance -= column[:, None] * (column / variance)


def _seconds(costs: Floats) -> Seconds:
    """costs: [3]."""
    call, position, row = costs.tolist()
    return call, position, row
