"""What a pass costs by its number of rows, a draft by its length, and waiting for the host: measured, never modelled.

The first two are step functions of the machine, so they are tables filled at start and refined while serving.

The third decides whether the host reads a pass before it launches the next. Reading costs the gap between the passes,
in which the device waits. It gains what text drafters find from the tokens just picked; behind an unread pass they have
only the text before it. So per slot the tokens gained are averaged over the passes that text drafters were asked for,
and weighed against the gap at the rate of plain decoding. A slot begins with the average of all requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

TIERS: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)

_WEIGHT = 0.1  # of a new measurement in a tier's average
_OUTLIER = 4.0  # a measurement this many times the average is a hiccup of the machine, not the pass

_SLOT_WEIGHT = 0.1  # of a pass in a slot's average
_USUAL_WEIGHT = 0.02  # of a pass in the average of all
_AT_FIRST = 1.0  # tokens a pass assumed before any was counted: high, so that passes are read
_NOTHING = 0.01  # tokens a pass that count as none


class _Seconds:
    """A running average that one hiccup does not move; two in a row are a machine that has become slower.

    If the first measurement was a hiccup itself, the average falls at once to the next.
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
        """The same for a single number of rows; an array of one element costs four times as much."""
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


class Gap:
    """The gap's length, and per slot what reading a pass first has gained. Not adaptive: the gap counts as nothing."""

    def __init__(self, *, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._seconds = DraftCost()
        self._gained: dict[int, float] = {}  # by slot: tokens a pass, averaged over the passes asked for
        self._usual = _AT_FIRST  # the same of all slots
        self._asked: set[int] = set()  # slots for whose running pass text drafters were asked

    def observe(self, seconds: float) -> None:
        """Learn from one pass that waited for the host."""
        self._seconds.observe(1, seconds)

    def begin(self, slot_id: int) -> None:
        """The slot has another text."""
        self._gained.pop(slot_id, None)
        self._asked.discard(slot_id)

    def ask(self, slot_ids: Iterable[int]) -> None:
        """Text drafters are asked for the next pass of these slots."""
        self._asked.update(slot_ids)

    def gain(self, slot_id: int, n_accepted: int) -> None:
        """A pass was verified that kept so many tokens of text drafters."""
        if slot_id in self._asked:
            self._asked.remove(slot_id)
            self._gained[slot_id] = _moved(self._gained.get(slot_id, self._usual), n_accepted, _SLOT_WEIGHT)
            self._usual = _moved(self._usual, n_accepted, _USUAL_WEIGHT)

    def pays(self, slot_ids: Iterable[int], token_s: float) -> bool:
        """Whether reading the pass first pays for these slots. token_s: seconds of plain decoding per token."""
        gained_s = token_s * sum(self._gained.get(slot_id, self._usual) for slot_id in slot_ids)
        return gained_s > (self._seconds(1) if self._adaptive else 0.0)


def _moved(average: float, value: float, weight: float) -> float:
    after = average + weight * (value - average)
    return after if after > _NOTHING else 0.0
