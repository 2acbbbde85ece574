"""What a pass costs by its rows, and a draft by its depth: learnt while serving, never final.

All costs are kept as logarithms beside the machine's pace (`pace.py`), so a busy neighbour leaves the ratios between
them alone, on which all decisions rest. A width has a reference, measured at start and moving slowly, and a deviation
from it.

A width that has become dear is no longer run, so nothing would ever show that it has become cheap again. So what was
measured is believed only until going by it could have cost more than a share of the time since: then the reference
counts again, and after longer the price assumed of a machine that nothing is known of. If the width is still dear, the
next pass shows it. What few measurements have shown is doubted sooner. References of all widths are doubted out of one
account, which grows by a share of the time and pays what such passes took beyond what was assumed of them.

Nor would anything show that plain passes are cheaper than they seem while drafts are always verified. So a pass without
drafts is due where none of its width has run for some passes: few after a change, or where a first measurement was not
believed; twice as many each time that it takes what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.drafting import WidthCost
from slipstream.engine.speculate.decide.draft_cost import ASSUMED, DraftCost, Seconds, scaled
from slipstream.engine.speculate.decide.pace import Pace
from slipstream.engine.speculate.drafter import Call

Floats = NDArray[np.float64]

# Rows of the passes that are measured at start.
WIDTHS: Sequence[int] = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
    *(192, 256, 384, 512, 768, 1024),
)

_REFERENCE_WEIGHT = 1 / 64  # of a width's deviation in its reference
_MOST_DRIFT = 0.02  # of a reference, by one measurement
_RESHAPE = 64  # passes after which the shares of widths are worked out again
_REPRICE = 4  # passes after which seconds are, where all have been of one width and as expected
_CONFIRMED = 8  # measurements after which what they show is no longer doubted sooner
_PROBE_SHARE = 0.07  # of the time, for finding out whether a deviation has passed
_DOUBT_SHARE = 0.005  # of the time, for finding out whether a reference still holds
_DOUBTS_SHARE = 0.007  # the same for all references together
_DOUBTED_AT_FIRST = 2.0  # passes of the narrowest width that this may cost besides
_DUE_SOON = 32  # passes until one of a width that has not been run is due, after a change
_DUE_AT_LAST = 1024  # the same if all has been as expected for long
# Of its expected seconds: what a draft or a pass takes at least where only both together were measured.
_LEAST_PART = 0.1
_ASSUMED = 2  # among what speaks for a cost
_PER_ROW = 0.02  # of a pass of one row, that another row costs on a machine that nothing is known of


@dataclass(slots=True)
class _Width:
    """Passes of about so many rows. `reference`: logarithm of seconds at the pace of the start."""

    index: int  # among the pace's widths
    reference: float
    at: float  # seconds of work when it was last measured
    pass_no: int  # of that measurement
    n_measured: int = _CONFIRMED  # since it last changed
    due_after: int = _DUE_AT_LAST  # passes without one of it


def _chosen(costs: tuple[float, float, float], age_s: float, n_measured: int, doubts_s: float = inf) -> int:
    """Which of these seconds to reckon with: measured lately, usually, and what is assumed where nothing is known.

    age_s: seconds of work since the last measurement; n_measured: since the last change; doubts_s: what doubting
    references may cost now.
    """
    recent, usual, free = costs
    sureness = min(1.0, n_measured / _CONFIRMED)
    if (recent - usual) * sureness > _PROBE_SHARE * age_s:
        return 0
    if (usual - free) * sureness > min(_DOUBT_SHARE * age_s, doubts_s):
        return 0 if recent < usual else 1
    return 0 if recent < free else _ASSUMED


class Costs:
    """Seconds of passes and drafts. A clock is not needed: time is what the measurements add up to."""

    def __init__(self) -> None:
        self._pace = Pace(len(WIDTHS))
        self._widths: dict[int, _Width] = {}
        self._drafts: dict[str, DraftCost] = {}
        self._work_s = 0.0
        self._doubts_s = 0.0  # that doubting references may cost now
        self._n_passes = 0
        # For each number of rows the width that speaks for it, and its share of that width's seconds.
        self._speaker, self._share = np.empty(0, np.int64), np.empty(0)
        self._floor = 0.0  # logarithm of the seconds of a pass without rows, if rows cost little
        self._last = -1  # which width spoke for the last pass
        self._reprice()

    def _reprice(self) -> None:
        """Work out seconds anew where they are asked for."""
        # Of the narrowest widths, as far as worked out; what a wider one takes at least.
        self._expected: list[float] = []
        self._is_doubted: list[bool] = []  # by width as above: what is assumed counts, not the reference
        self._least = 0.0
        self._by_rows = np.empty(0)  # [n_rows], as far as worked out

    def passed(self, n_rows: int, seconds: float, unread: Call | None = None) -> None:
        """A pass has run: the first of a width adds it, before the first request. Others learn from all that follow.

        unread: the draft before it that the host did not wait for, so that only both together were measured. Passes
        larger than the last width are prompt work and say nothing here.
        """
        if unread is not None and n_rows <= len(self._share):
            draft_s = self._drafted_part(unread, n_rows, seconds)
            self.drafted(unread.name, unread.n_positions, draft_s, unread.n_fed)
            seconds -= draft_s
        if seconds <= 0.0:
            return
        if n_rows in WIDTHS and n_rows not in self._widths and not self._work_s:
            self._add(n_rows, log(seconds) - self._pace.now())
        elif n_rows <= len(self._share):
            self._measure_width(n_rows, seconds)
        self._n_passes += 1
        if self._widths and self._n_passes % _RESHAPE == 0:
            self._shape()
        if self._n_passes % _REPRICE == 0:
            self._reprice()

    def _drafted_part(self, unread: Call, n_rows: int, seconds: float) -> float:
        """The draft's seconds of those that it took with its pass: what is expected, and a share of the surprise.

        The less certain of the two has the greater share.
        """
        width = [*self._widths.values()][self._speaker[n_rows - 1]]
        pace = exp(self._pace.now())
        draft, draft_error = self._draft(unread.name).expected(unread.n_positions, unread.n_fed)
        pass_s = float(self._share[n_rows - 1]) * self._measured_s(width)
        draft_s, variance = pace * draft, (pace * draft_error) ** 2
        share = variance / (variance + (pass_s * self._pace.error(width.index)) ** 2)
        # Neither has taken no time at all, however fast both were.
        draft_s = max(_LEAST_PART * draft_s, draft_s + share * (seconds - draft_s - pass_s))
        return min(draft_s, max(0.0, seconds - _LEAST_PART * pass_s))

    def _add(self, n_rows: int, reference: float) -> None:
        """A width's first measurement. It is not believed if the rows one by one would have taken less."""
        is_believed = True
        if self._widths:
            least, width = next(iter(self._widths.items()))
            if n_rows > least and reference > width.reference + log(n_rows / least):
                is_believed = False
                reference = width.reference + log((1.0 + _PER_ROW * n_rows) / (1.0 + _PER_ROW * least))
        else:
            self._doubts_s = _DOUBTED_AT_FIRST * exp(reference)
        self._widths[n_rows] = _Width(WIDTHS.index(n_rows), reference, self._work_s, self._n_passes)
        self._widths = dict(sorted(self._widths.items()))
        if not is_believed:
            self._due_soon()
        self._shape()

    def _shape(self) -> None:
        """Work out which width speaks for which number of rows. Deviations have no say: they may be wrong together."""
        widths = np.array([*self._widths])
        references = np.exp([one.reference for one in self._widths.values()])
        n_rows = np.arange(1, widths[-1] + 1)
        self._speaker = np.abs(np.log(n_rows)[:, None] - np.log(widths)).argmin(1)
        usual = np.interp(n_rows, widths, references)
        self._share = usual / references[self._speaker]
        self._floor = min(one.reference - log(1.0 + _PER_ROW * n) for n, one in self._widths.items())
        self._reprice()

    def _measure_width(self, n_rows: int, seconds: float) -> None:
        speaker = self._speaker[n_rows - 1]
        width = [*self._widths.values()][speaker]
        worked_s = min(seconds, 2.0 * self.at(n_rows))
        self._work_s += worked_s
        self._doubts_s += _DOUBTS_SHARE * worked_s
        full = log(seconds / self._share[n_rows - 1])
        was_due = self._is_due(width)
        is_change = self._pace.measure(width.index, full - width.reference, was_due=was_due)
        if is_change is None:
            return
        width.n_measured = 2 if is_change else width.n_measured + 1
        if is_change:
            self._due_soon()
        elif was_due:
            width.due_after = min(_DUE_AT_LAST, 2 * width.due_after)
        width.at, width.pass_no = self._work_s, self._n_passes
        if self._is_doubted[speaker]:
            self._pay(exp(full), exp(self._pace.now() + width.reference), self._expected[speaker])
        drift = _REFERENCE_WEIGHT * self._pace.deviation(width.index)
        drift = max(-_MOST_DRIFT, min(_MOST_DRIFT, drift))
        width.reference += drift
        self._pace.drift(width.index, drift)
        if is_change or speaker != self._last:
            self._reprice()
        self._last = speaker

    def is_due(self, n_rows: int) -> bool:
        """Whether passes of about so many rows have not been run for so long that one is worth its price."""
        if n_rows > len(self._share):
            return False
        return self._is_due([*self._widths.values()][self._speaker[n_rows - 1]])

    def _is_due(self, width: _Width) -> bool:
        return self._n_passes - width.pass_no > width.due_after

    def _due_soon(self) -> None:
        """What is believed of widths that are not run may be wrong."""
        for width in self._widths.values():
            width.due_after = _DUE_SOON

    def _pay(self, seconds: float, usual_s: float, assumed_s: float) -> None:
        """A doubt was answered: it costs what the pass took beyond what was assumed, and brings in what it saves."""
        seconds = min(seconds, usual_s)
        self._doubts_s = max(0.0, self._doubts_s + (usual_s - seconds) - max(0.0, seconds - assumed_s))

    def _measured_s(self, width: _Width) -> float:
        return exp(self._pace.now() + width.reference + self._pace.deviation(width.index))

    def __call__(self, n_rows: NDArray[np.int64]) -> Floats:
        """Expected seconds of a pass for each number of rows; 1 + 2 % a row before any measurement.

        Beyond the last width they grow as they do over the last half.
        """
        if not self._widths:
            return np.asarray(1.0 + _PER_ROW * n_rows, np.float64)
        most, last = int(n_rows.max(initial=1)), len(self._share)
        if most <= last:
            return self._table(most)[n_rows - 1]
        known = np.minimum(n_rows, last)
        return np.asarray(self._table(last)[known - 1] + (n_rows - known) * self._slope_s())

    def at(self, n_rows: int) -> float:
        """The same for a single number of rows; an array of one element costs four times as much."""
        if not self._widths:
            return 1.0 + _PER_ROW * n_rows
        known = min(n_rows, len(self._share))
        seconds = float(self._table(known)[known - 1])
        return seconds if known == n_rows else seconds + (n_rows - known) * self._slope_s()

    def _table(self, n_rows: int) -> Floats:
        """Seconds of passes of 1, 2 … rows, [at least n_rows]: planning a pass asks for the same ones tens of times."""
        if len(self._by_rows) < n_rows:
            # All that the last width speaks for.
            n = int(self._speaker.searchsorted(self._speaker[n_rows - 1], "right"))
            widths = np.array(self._seconds_of(1 + int(self._speaker[n - 1])))
            self._by_rows = widths[self._speaker[:n]] * self._share[:n]
        return self._by_rows

    def _slope_s(self) -> float:
        """Seconds of a row beyond the last width."""
        last = len(self._share)
        if last == 1:
            return _PER_ROW * self.at(1)
        return max(0.0, self.at(last) - self.at(-(-last // 2))) / (last // 2)

    def _seconds_of(self, n_widths: int) -> list[float]:
        """Seconds of at least so many of the narrowest widths, worked out once between two passes."""
        known = self._expected
        if len(known) < n_widths:
            pace = self._pace.now()
            floor = exp(pace + self._floor)
            for n_rows, width in [*self._widths.items()][len(known) : n_widths]:
                # Whatever is not known of a width, it is not cheaper than narrower passes.
                usual, free = exp(pace + width.reference), max(self._least, floor * (1.0 + _PER_ROW * n_rows))
                costs = self._measured_s(width), usual, free
                age_s = self._work_s - width.at
                chosen = _chosen(costs, age_s, width.n_measured, self._doubts_s)
                known.append(costs[chosen])
                self._is_doubted.append(chosen == _ASSUMED and free < usual)
                self._least = min(usual, known[-1])
        return known

    def drafted(self, name: str, n_positions: int, seconds: float, n_fed: int = 0) -> None:
        """A network has guessed at so many positions, all slots together, after it was fed so many rows.

        Of a text drafter, which is asked slot by slot, all of the time is the call's: it has no positions.
        """
        if seconds > 0.0:
            draft = self._draft(name)
            if not draft.n_calls:
                # No network is dearer than its target: the first measurement may be a hiccup.
                seconds = min(seconds, (1 + n_positions + n_fed) * self.at(1))
            draft.measure(n_positions, n_fed, seconds / exp(self._pace.now()), self._work_s)

    def _draft(self, name: str) -> DraftCost:
        if name not in self._drafts:
            self._drafts[name] = DraftCost(self.at(1) / exp(self._pace.now()), self._work_s)
        return self._drafts[name]

    def draft_s(self, name: str, n_positions: int, n_fed: int = 0) -> float:
        """Expected seconds of a draft, the call included; 0 before any measurement."""
        call, position, row = self.call_s(name, n_positions, n_fed)
        return call + n_positions * position + n_fed * row

    def call_s(self, name: str, n_positions: int = 1, n_fed: int = 0) -> Seconds:
        """Expected seconds of a drafter's call, of a position and of a row that it is fed, in a call of so many.

        Whether what was measured is believed depends on the whole of this call, or of the last if that was more.
        """
        cost = self._drafts.get(name)
        if cost is None:
            return 0.0, 0.0, 0.0
        pace = exp(self._pace.now())
        n_positions, n_fed = max(n_positions, cost.last[0]), max(n_fed, cost.last[1])
        known = scaled(cost.recent, pace), scaled(cost.usual, pace), scaled(ASSUMED, self.at(1))
        recent, usual, free = [call + n_positions * position + n_fed * row for call, position, row in known]
        return known[_chosen((recent, usual, free), self._work_s - cost.at, cost.n_measured)]

    def widths(self) -> list[WidthCost]:
        """What is known of passes, by their rows."""
        if not self._widths:
            return []
        known = []
        for (n_rows, width), seconds in zip(
            self._widths.items(), self._seconds_of(len(self._widths)), strict=True
        ):
            age_s, error = self._work_s - width.at, self._pace.error(width.index)
            known.append(WidthCost(n_rows, seconds, self._measured_s(width), age_s, error))
        return known
