"""How many tokens to verify for every slot, and how deep a network should draft: the most tokens per second.

Every token that could be verified has a survival: the probability that it is accepted together with all before it.
Taken in descending order over all slots, they are worth verifying while tokens ÷ measured seconds grows. Survivals of
a slot never increase, so what is taken is a beginning of every draft. Source: goodput maximisation (SmartSpec, arXiv
2406.14066) with one survival per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.speculate.decide.cost import Costs
from slipstream.engine.speculate.decide.overlap import Overlap
from slipstream.engine.speculate.decide.trials import Allowance

Floats = NDArray[np.float64]

_MARGIN = 1.02  # drafts must promise this much more than none, or they are not worth the noise
_PASSES_FED_FOR = 8  # that a network's rows are thought to serve
_ROWS_OF_A_DRAFT = 8  # over which the price of a row is averaged


@dataclass(frozen=True, slots=True)
class Pass:
    """The coming pass as far as it is known before drafting."""

    n_ready: int  # slots that will gain a token even without drafts
    n_rows: int  # rows without drafts, prompt chunks included


@dataclass(frozen=True, slots=True)
class _Depth:
    """How deep a network may draft: tokens per second, positions, the slots that take it, rows to verify."""

    rate: float
    n_positions: int
    takes: list[bool]
    n_rows: int


def _table(survivals: Sequence[Floats]) -> Floats:
    """[n_slots, longest], 0 past the end of a row."""
    table = np.zeros((len(survivals), max(len(one) for one in survivals)))
    for row, one in zip(table, survivals, strict=True):
        row[: len(one)] = one
    return table


def worth(survival: Floats, price: float) -> float:
    """Expected tokens of a draft beyond what their rows cost, at `price` tokens a row. survival: [n_tokens]."""
    return float(np.maximum(survival - price, 0.0).sum()) if len(survival) else 0.0


class Lengths:
    """Draft lengths from survivals and one table of costs. Not adaptive: costs count as nothing, all is verified."""

    def __init__(self, *, adaptive: bool) -> None:
        self.costs = Costs()
        self.adaptive = adaptive
        self.allowance = Allowance(adaptive=adaptive)
        self.overlap = Overlap(self.costs if adaptive else None)

    def begin(self, slot_id: int) -> None:
        """The slot has another text."""
        self.allowance.begin(slot_id)
        self.overlap.begin(slot_id)

    def token_s(self, coming: Pass) -> float:
        """Seconds in which plain decoding makes a token."""
        return self.costs.at(coming.n_ready) / coming.n_ready

    def price(self, coming: Pass) -> float:
        """Tokens that one more row must promise to be worth its time, at the rate of plain decoding."""
        if not self.adaptive:
            return 0.0
        return self._row_s(coming, _ROWS_OF_A_DRAFT * coming.n_ready) / self.token_s(coming)

    def _row_s(self, coming: Pass, n_rows: int) -> float:
        """Seconds of a further row, if there are so many."""
        if not self.adaptive:
            return 0.0
        at = self.costs.at
        return max(0.0, at(coming.n_rows + n_rows) - at(coming.n_rows)) / n_rows

    def trim(self, survivals: Sequence[Floats], coming: Pass) -> list[int]:
        """How many tokens of each draft to verify; survivals hold one array per slot, [n_drafted]."""
        if not self.adaptive or not any(len(one) for one in survivals):
            return [len(one) for one in survivals]
        _, n_taken, order = self._best(survivals, coming)
        owner = np.arange(len(survivals)).repeat([len(one) for one in survivals])
        taken: list[int] = np.bincount(owner[order[:n_taken]], minlength=len(survivals)).tolist()
        return taken

    def depth(
        self,
        name: str,
        free: Sequence[Floats],
        drafted: Sequence[Floats],
        n_unfed: Sequence[int],
        coming: Pass,
    ) -> tuple[int, list[bool]]:
        """How deep a network should draft in this step, and for which slots.

        free: survivals of what each slot has without it, [n_free]; drafted: those expected of the network, [n_max];
        n_unfed: rows it has to be fed for each slot. Depth is shared: its cost is one pass of the draft network per
        position, for all slots together. What is fed serves the passes that follow, too, and is charged in parts.
        """
        if not self._may_pay(name, drafted, coming):
            return 0, [False] * len(free)
        position_s = self.costs.draft_s(name, 1)
        feeding_s = np.array([self.costs.draft_s(name, 0, n) for n in n_unfed]) / _PASSES_FED_FOR
        feeding_s *= self.adaptive
        slots = _table(free), _table(drafted), feeding_s[:, None]
        rate, _, _ = self._best(free, coming)
        best = _Depth(rate * (_MARGIN if self.adaptive else 1.0), 0, [False] * len(free), 0)
        # What a row costs depends on how many there are: few, all, and then as many as have proved best.
        for n_rows in (2 * len(free), sum(map(len, drafted)), 0):
            row_s = self._row_s(coming, n_rows or best.n_rows or 1)
            found = self._deepest(position_s, slots, coming, (rate, rate * row_s))
            if found.rate > best.rate:
                best, rate = found, found.rate
        return best.n_positions, best.takes

    def _may_pay(self, name: str, drafted: Sequence[Floats], coming: Pass) -> bool:
        """Whether all that a network promises would be worth its first position, if rows cost nothing.

        Most networks that do not pay fail here, in a tenth of the time that `depth` takes to find it out.
        """
        if not self.adaptive:
            return True
        worth_s = self.token_s(coming) * float(sum(one.sum() for one in drafted))
        return worth_s > self.costs.draft_s(name, 1) + (_MARGIN - 1.0) * self.costs.at(coming.n_ready)

    def _deepest(
        self, position_s: float, slots: tuple[Floats, Floats, Floats], coming: Pass, at: tuple[float, float]
    ) -> _Depth:
        """The best depth if time and rows are priced so.

        position_s: of the network; slots: survivals without it, with it, [n_slots, length] each, and what feeding it
        costs, [n_slots, 1] seconds; at: tokens a second costs, tokens a row costs.
        """
        (free, survival, feeding_s), (rate, price) = slots, at
        pays = survival > price
        gain = np.where(pays, survival - price, 0.0).cumsum(1)  # [n_slots, depth]
        pays_free = free > price
        n_free = pays_free.sum(1, keepdims=True)  # [n_slots, 1]
        t_free = np.where(pays_free, free, 0.0).sum(1, keepdims=True)
        takes = gain - rate * feeding_s > t_free - price * n_free
        n_rows = np.where(takes, pays.cumsum(1), n_free).sum(0)  # [depth]
        tokens = np.where(takes, np.where(pays, survival, 0.0).cumsum(1), t_free).sum(0)
        seconds = self._seconds(coming, n_rows)
        if self.adaptive:
            depths = np.arange(1, survival.shape[1] + 1)
            seconds = seconds + position_s * depths + (takes * feeding_s).sum(0)
        rates = np.where(takes.any(0), (coming.n_ready + tokens) / seconds, -1.0)
        # Of equal rates the least depth; where costs count as nothing the greatest, however little it promises.
        best = int(rates.argmax()) if self.adaptive else len(rates) - 1 - int(rates[::-1].argmax())
        return _Depth(float(rates[best]), best + 1, takes[:, best].tolist(), int(n_rows[best]))

    def _seconds(self, coming: Pass, n_drafted: NDArray[np.int64]) -> Floats:
        """Seconds of the pass by rows for drafts, without those of the work beside the ready slots.

        That work (prompt chunks) makes rows cost more or less; its own time is not charged to them.
        """
        if not self.adaptive:
            return np.ones(len(n_drafted))
        beside = self.costs.at(coming.n_ready) - self.costs.at(coming.n_rows)
        return beside + self.costs(coming.n_rows + n_drafted)

    def _best(self, survivals: Sequence[Floats], coming: Pass) -> tuple[float, int, NDArray[np.int64]]:
        """(tokens per second, drafts to verify, draft tokens in descending order of survival)."""
        flat = np.concatenate(survivals)
        order = (-flat).argsort(kind="stable")
        tokens = np.full(len(flat) + 1, float(coming.n_ready))
        tokens[1:] += flat[order].cumsum()
        rates = tokens / self._seconds(coming, np.arange(len(flat) + 1))
        n_best = int(rates.argmax())
        if rates[n_best] < _MARGIN * rates[0]:
            n_best = 0
        return float(rates[n_best]), n_best, order
