"""How slow the machine is just now, and each width beside it: a Kalman filter over logarithms of seconds.

Its state is the machine's pace and one deviation per width; a pass measures the sum of both. The covariance says to
which of them a surprise belongs: if passes of 16 rows have become slow and nothing else has run since, it may be the
machine or that width alone, so half of it is charged to either. The next pass of another width decides, and moves the
first width's share with it. Widths that are not run follow the pace, and their deviations become uncertain again.

A single measurement far from what is expected is a hiccup (a page fault, a suspended process) and counts for nothing;
two in a row are a change, which opens the covariance. Source: Kalman (1960), with robust practice.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

_NOISE = 0.15  # standard deviations, all of logarithms: of a measurement,
_PACE_STEP = 0.05  # of the pace from one pass to the next,
_DEVIATION = 0.15  # of a width from its reference, where nothing has been measured lately,
_CHANGE = 1.0  # of pace and deviation where something has changed
_FORGET = 0.5 ** (1 / 64)  # a deviation's certainty, one pass later
_FAR = float(np.log(3.0))  # from what is expected: a hiccup, unless the next is as far
_MOST = float(np.log(9.0))  # believed of one change; or a process suspended twice would seem slow for hours
_CLIP = 3.0  # standard deviations that a surprise counts for at most


class Pace:
    """The pace and the deviations of `n_widths` widths. All begin at 0."""

    def __init__(self, n_widths: int) -> None:
        n = 1 + n_widths
        self._state = np.zeros(n)
        self._covariance = np.diag([_PACE_STEP**2, *[_DEVIATION**2] * n_widths])  # [n, n]
        kept = np.array([1.0, *[_FORGET] * n_widths])
        self._kept = np.outer(kept, kept)
        self._added = np.diag([_PACE_STEP**2, *[(1.0 - _FORGET**2) * _DEVIATION**2] * n_widths])
        # Width and surprise of the measurement before, if a hiccup.
        self._far: tuple[int, float] | None = None

    def now(self) -> float:
        """The machine's pace."""
        return float(self._state[0])

    def deviation(self, width: int) -> float:
        """Of a width from the pace."""
        return float(self._state[1 + width])

    def error(self, width: int) -> float:
        """Standard deviation of pace and deviation together."""
        column = self._covariance[0] + self._covariance[1 + width]
        return sqrt(column[0] + column[1 + width])

    def drift(self, width: int, step: float) -> None:
        """The reference that the width's deviation is from has moved."""
        self._state[1 + width] -= step

    def measure(self, width: int, value: float, *, was_due: bool = False) -> bool | None:
        """Learn from a pass; returns whether it has shown a change, None if it counts as a hiccup.

        value: logarithm of its seconds over the width's reference. was_due: it has not run for long.
        """
        self._covariance *= self._kept
        self._covariance += self._added
        i = 1 + width
        surprise = value - float(self._state[0] + self._state[i])
        before, self._far = self._far, None
        is_change = abs(surprise) > _FAR
        if is_change:
            if before is None or before[0] != width or (before[1] > 0.0) != (surprise > 0.0):
                self._far = width, surprise
                return None
            surprise = max(-_MOST, min(_MOST, min(surprise, before[1], key=abs)))
            self._covariance[0, 0] += _CHANGE**2
            # No width becomes faster on its own, but it may never have been as slow as was thought.
            if was_due or surprise > 0.0 or self._state[i] > 0.0:
                self._covariance[i, i] += _CHANGE**2
        column = self._covariance[0] + self._covariance[i]  # [n], with what a pass measures
        variance = float(column[0] + column[i]) + _NOISE**2
        most = _CLIP * sqrt(variance)
        self._state += column * (max(-most, min(most, surprise)) / variance)
        self._covariance -= column[:, None] * (column / variance)
        return is_change
