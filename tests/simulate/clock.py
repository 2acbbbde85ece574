"""A machine's clock in virtual seconds, and what disturbs the machine: all of it read from the machine's file."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST = 10**9  # repetitions of what recurs without end


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """A time in which work takes `factor` times as long, with noise of its own."""

    start_s: float
    length_s: float
    factor: float = 1.0
    sigma: float = 0.0  # of additional lognormal noise
    widths: Sequence[
        int
    ] = ()  # (fewest, most) rows of the passes concerned; empty: all work, drafters' included
    every_s: float = math.inf  # it recurs
    count: int = _MOST

    def covers(self, at_s: float, n_rows: int | None) -> bool:
        """Whether it holds at a time for work of so many rows; None: work of a drafter."""
        since = at_s - self.start_s
        if since < 0.0:
            return False
        k = 0 if math.isinf(self.every_s) else int(since / self.every_s)
        if k >= self.count or (since - k * self.every_s if k else since) >= self.length_s:
            return False
        return not self.widths or (n_rows is not None and self.widths[0] <= n_rows <= self.widths[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Work becomes `factor` times as long from `start_s` on, evenly over `length_s`; 0: at once."""

    start_s: float
    factor: float
    length_s: float = 0.0

    def at(self, at_s: float) -> float:
        since = at_s - self.start_s
        if since < 0.0:
            return 1.0
        share = 1.0 if self.length_s <= 0.0 else min(1.0, since / self.length_s)
        return 1.0 + share * (self.factor - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    """The process stands still: whatever is under way takes `length_s` longer."""

    start_s: float
    length_s: float
    every_s: float = math.inf
    count: int = 1

    @property
    def starts(self) -> list[float]:
        return [self.start_s + (i * self.every_s if i else 0.0) for i in range(self.count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """The clock jumps during a pass, which seems to have taken `seems_s`."""

    start_s: float
    seems_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """All that disturbs a machine. noise: sigma of the lognormal noise of all work, whose mean is 1."""

    noise: float = 0.0
    spells: Sequence[Spell] = ()
    drifts: Sequence[Drift] = ()
    suspensions: Sequence[Suspension] = ()
    jumps: Sequence[Jump] = ()

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Trouble:
        """What a machine's file says; raises `TypeError` for a key that is unknown."""
        return cls(
            noise=table.get("noise", 0.0),
            spells=[Spell(**one) for one in table.get("spell", ())],
            drifts=[Drift(**one) for one in table.get("drift", ())],
            suspensions=[Suspension(**one) for one in table.get("suspension", ())],
            jumps=[Jump(**one) for one in table.get("jump", ())],
        )


class Clock:
    """Virtual time. `real_s` is what passes; `now` is what the planner reads, which jumps with the clock."""

    def __init__(self, trouble: Trouble, seed: int) -> None:
        self.real_s = 0.0
        self.stopped_s = 0.0  # of that, the process was suspended
        self._ahead_s = 0.0  # what the planner's clock is ahead
        self._random = random.Random(seed)
        self._stops: list[tuple[float, float]] = []
        self._jumps: list[tuple[float, float]] = []
        self.disturb(trouble)

    def disturb(self, trouble: Trouble) -> None:
        """From now on this disturbs the machine, and nothing else does. Its times count from now."""
        self._trouble = trouble
        self._zero_s = self.real_s
        stops = [(start, one.length_s) for one in trouble.suspensions for start in one.starts]
        self._stops = sorted(stops, reverse=True)
        self._jumps = sorted(((one.start_s, one.seems_s) for one in trouble.jumps), reverse=True)

    def now(self) -> float:
        """Seconds, as the planner reads them."""
        return self.real_s + self._ahead_s

    def spend(self, work_s: float, n_rows: int | None = None) -> float:
        """Do work that takes so long undisturbed; returns how long it seems to take.

        n_rows: rows of a pass; None: work of a drafter.
        """
        trouble, since_s = self._trouble, self.real_s - self._zero_s
        seconds, sigma = work_s, trouble.noise
        for drift in trouble.drifts:
            seconds *= drift.at(since_s)
        for spell in trouble.spells:
            if spell.covers(since_s, n_rows):
                seconds *= spell.factor
                sigma = math.hypot(sigma, spell.sigma)
        if sigma:
            seconds *= self._random.lognormvariate(-0.5 * sigma * sigma, sigma)
        while self._stops and self._stops[-1][0] < since_s + seconds:
            length_s = self._stops.pop()[1]
            seconds += length_s
            self.stopped_s += length_s
        self.real_s += seconds
        if n_rows is not None and self._jumps and self._jumps[-1][0] < since_s + seconds:
            seems_s = self._jumps.pop()[1]
            self._ahead_s += seems_s - seconds
            return seems_s
        return seconds


def interpolated(points: Sequence[Sequence[float]], most: int) -> list[float]:
    """Values at 0 … most of the lines between points [x, y]; beyond the last as steep as before it."""
    xs, ys = [one[0] for one in points], [one[1] for one in points]
    found = []
    for x in range(most + 1):
        i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        if len(xs) == 1 or x <= xs[0]:
            found.append(ys[0])
            continue
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        found.append(ys[i - 1] + slope * (x - xs[i - 1]))
    return found
