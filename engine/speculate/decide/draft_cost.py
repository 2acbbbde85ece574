"""What a drafter's call costs: a Kalman filter of what the call, a position that it guesses and a row fed before cost.

A call measures the sum of the three, so the filter says how much of a surprise is owed to which. As for passes, one
call far from what was expected is a hiccup, and two in a row are a change.
"""

from __future__ import annotations

from math import sqrt

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


def _dot(first: Seconds, second: Seconds) -> float:
    return first[0] * second[0] + first[1] * second[1] + first[2] * second[2]


class DraftCost:
    """What a drafter costs, at the pace of the start.

    `recent`: as measured lately; `usual`: the same, moving slowly. Plain floats, as every pass reads them and measures
    text drafters, and of three numbers an array takes several times as long.
    """

    def __init__(self, pass_s: float, at: float) -> None:
        """pass_s: seconds of a pass of one row; at: seconds of work until now."""
        self.recent = self.usual = scaled(ASSUMED, pass_s)
        self.at = at  # when it was last measured
        self.n_measured = 0  # since the last doubt
        self.last = 1, 0  # the last call: positions, rows
        self.n_calls = 0  # that were measured
        self._far: float | None = None  # the measurement before, if that was a hiccup
        self.doubt()

    def doubt(self) -> None:
        """What was measured may be wrong."""
        self.n_measured = 0
        call, position, row = scaled(self.recent, _UNKNOWN)
        self._covariance: list[Seconds] = [(call**2, 0.0, 0.0), (0.0, position**2, 0.0), (0.0, 0.0, row**2)]

    def measure(self, n_positions: int, n_fed: int, seconds: float, at: float) -> None:
        """Learn from a call."""
        self.last = n_positions, n_fed
        call = 1.0, float(n_positions), float(n_fed)
        before, self._far = self._far, None
        expected = _dot(call, self.recent)
        ratio = seconds / expected
        if self.n_measured and not 1 / _HICCUP < ratio < _HICCUP and self._is_odd(call, seconds - expected):
            if before is None or (before > 1.0) != (ratio > 1.0):
                self._far = ratio
                return
            ratio = min(ratio, before, _MOST) if ratio > 1.0 else max(ratio, before, 1 / _MOST)
            self.recent = scaled(self.recent, ratio)
            self.doubt()
        self._correct(call, seconds)
        self.n_calls += 1
        weight = max(_WEIGHT, 1 / self.n_calls)
        call_s, position_s, row_s = (
            usual * (recent / usual) ** weight for usual, recent in zip(self.usual, self.recent, strict=True)
        )
        self.usual = call_s, position_s, row_s
        self.n_measured += 1
        self.at = at

    def expected(self, n_positions: int, n_fed: int) -> tuple[float, float]:
        """Seconds of a call by what was measured lately, and their standard deviation."""
        call = 1.0, float(n_positions), float(n_fed)
        return _dot(call, self.recent), sqrt(_dot(call, self._column(call)))

    def _is_odd(self, call: Seconds, surprise: float) -> bool:
        """Whether so much of a surprise is more than what is not known yet of the costs."""
        return surprise**2 > _ODD**2 * _dot(call, self._column(call))

    def _column(self, call: Seconds) -> Seconds:
        """Covariances of the three with what a call measures."""
        of_call, of_position, of_row = self._covariance
        return _dot(of_call, call), _dot(of_position, call), _dot(of_row, call)

    def _correct(self, call: Seconds, seconds: float) -> None:
        (a, b, c), (_, d, e), (_, _, f) = self._covariance
        u, v, w = scaled(self.recent, _STEP)
        self._covariance = [(a + u * u, b, c), (b, d + v * v, e), (c, e, f + w * w)]
        expected = _dot(call, self.recent)
        column = self._column(call)
        variance = _dot(call, column) + (_NOISE * max(seconds, expected)) ** 2
        step = scaled(column, (seconds - expected) / variance)
        call_s, position_s, row_s = (
            max(_LEAST * before, before + more, _LEAST_S)
            for before, more in zip(self.recent, step, strict=True)
        )
        self.recent = call_s, position_s, row_s
        self._covariance = [
            _less(row, column, part / variance) for row, part in zip(self._covariance, column, strict=True)
        ]


def _less(row: Seconds, column: Seconds, share: float) -> Seconds:
    """A row of the covariance without its share of what a call has shown."""
    return row[0] - share * column[0], row[1] - share * column[1], row[2] - share * column[2]
