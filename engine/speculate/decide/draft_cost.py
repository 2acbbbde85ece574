"""What a drafter's call costs by the positions it guesses and the rows it is fed first: a Kalman filter of two costs.

A call measures the sum of both, so the filter says how much of a surprise is owed to either. As for passes, one call
far from what was expected is a hiccup, and two in a row are a change.
"""

from __future__ import annotations

_POSITION, _FED_ROW = 0.1, 0.002  # of a pass of one row: what is assumed where nothing is known of a network
_UNKNOWN = 3.0  # standard deviation of a cost that nothing is known of, beside the cost
_STEP = 0.05  # by which a cost moves from one call to the next
_NOISE = 0.2  # standard deviation of a call's seconds, beside those expected
_HICCUP = 3.0  # times too long or too short
_MOST = 9.0  # believed of one change
_WEIGHT = 1 / 64  # of a cost in what is usual
_LEAST = 0.1  # of what it was: no cost falls further by one call, or to nothing


def assumed_s(pass_s: float, depth: int, n_fed: int) -> float:
    """Seconds of a call where nothing is known of the network. pass_s: of a pass of one row."""
    return pass_s * (depth * _POSITION + n_fed * _FED_ROW)


class DraftCost:
    """Seconds at the pace of the start."""

    def __init__(self, pass_s: float, at: float) -> None:
        """pass_s: seconds of a pass of one row; at: seconds of work until now."""
        self._position, self._row = assumed_s(pass_s, 1, 0), assumed_s(pass_s, 0, 1)
        self._usual = self._position, self._row
        self.at = at  # when it was last measured
        self.n_measured = 0  # since the last change
        self._n_calls = 0
        self._far: float | None = None  # the measurement before, if that was a hiccup
        self._reopen()

    def _reopen(self) -> None:
        """Variance of the position's cost, covariance, variance of the row's."""
        self._covariance = (_UNKNOWN * self._position) ** 2, 0.0, (_UNKNOWN * self._row) ** 2

    def expected(self, depth: int, n_fed: int) -> tuple[float, float]:
        """Seconds of a call, by what was measured lately and by what is usual."""
        position, row = self._usual
        return depth * self._position + n_fed * self._row, depth * position + n_fed * row

    def measure(self, depth: int, n_fed: int, seconds: float, at: float) -> None:
        """Learn from a call that guessed so many positions after it was fed so many rows."""
        expected, _ = self.expected(depth, n_fed)
        before, self._far = self._far, None
        ratio = seconds / expected
        if self.n_measured and not 1 / _HICCUP < ratio < _HICCUP:
            if before is None or (before > 1.0) != (ratio > 1.0):
                self._far = ratio
                return
            ratio = min(ratio, before, _MOST) if ratio > 1.0 else max(ratio, before, 1 / _MOST)
            self._position, self._row, self.n_measured = ratio * self._position, ratio * self._row, 1
            self._reopen()
            expected *= ratio
        self._correct(depth, n_fed, seconds - expected, _NOISE * max(seconds, expected))
        self._n_calls += 1
        weight = max(_WEIGHT, 1 / self._n_calls)
        position, row = self._usual
        self._usual = _slowly(position, self._position, weight), _slowly(row, self._row, weight)
        self.n_measured += 1
        self.at = at

    def _correct(self, depth: int, n_fed: int, surprise: float, noise: float) -> None:
        of_position, of_both, of_row = self._covariance
        of_position, of_row = of_position + (_STEP * self._position) ** 2, of_row + (_STEP * self._row) ** 2
        position, row = depth * of_position + n_fed * of_both, depth * of_both + n_fed * of_row
        variance = depth * position + n_fed * row + noise**2
        self._position = max(_LEAST * self._position, self._position + position * surprise / variance)
        self._row = max(_LEAST * self._row, self._row + row * surprise / variance)
        self._covariance = (
            of_position - position**2 / variance,
            of_both - position * row / variance,
            of_row - row**2 / variance,
        )


def _slowly(usual: float, recent: float, weight: float) -> float:
    """What is usual after another measurement."""
    return usual * (recent / usual) ** weight
