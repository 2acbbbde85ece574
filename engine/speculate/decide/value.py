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
from slipstream.engine.speculate.decide.feeding import Feeding
from slipstream.engine.speculate.decide.overlap import Overlap
from slipstream.engine.speculate.decide.trials import Allowance

Floats = NDArray[np.float64]

_MARGIN = 1.02  # drafts must promise this much more than none, or they are not worth the noise
# Depths that are weighed, besides the most that is allowed.
_DEPTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48])
_ROWS_OF_A_DRAFT = (2, 4, 8, 16)  # over which the price of a row is averaged


@dataclass(frozen=True, slots=True)
class Pass:
    """The coming pass as far as it is known before drafting."""

    n_ready: int  # slots that will gain a token even without drafts
    n_rows: int  # rows without drafts, prompt chunks included


def _table(survivals: Sequence[Floats], length: int) -> Floats:
    """[n_slots, length], 0 past the end of a row."""
    table = np.zeros((len(survivals), length))
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
        self.overlap = Overlap(adaptive=adaptive)
        self.feeding = Feeding()

    def begin(self, slot_id: int) -> None:
        """The slot has another text."""
        self.allowance.begin(slot_id)
        self.overlap.begin(slot_id)
        self.feeding.begin(slot_id)

    def token_s(self, coming: Pass) -> float:
        """Seconds in which plain decoding makes a token."""
        return self.costs.at(coming.n_ready) / coming.n_ready

    def rows_s(self, n_rows: int, coming: Pass) -> float:
        """Seconds that so many rows more add to the coming pass; never less than none."""
        return max(0.0, self.costs.at(coming.n_rows + n_rows) - self.costs.at(coming.n_rows))

    def measures_plain(self, coming: Pass) -> bool:
        """Whether the coming pass is to do without drafts, to show what plain decoding costs; without prompts only."""
        return self.adaptive and coming.n_rows == coming.n_ready and self.costs.is_due(coming.n_rows)

    def price(self, coming: Pass) -> float:
        """Tokens that one more row must promise to be worth its time, at the rate of plain decoding.

        By the number of rows at which one more is cheapest: where tiles, experts or a slow width make the first rows
        dear, that is not at the first.
        """
        if not self.adaptive:
            return 0.0
        pass_s = self.costs.at(coming.n_rows)
        more = [n * coming.n_ready for n in _ROWS_OF_A_DRAFT]
        row_s = min((self.costs.at(coming.n_rows + n) - pass_s) / n for n in more)
        return max(0.0, row_s) / self.token_s(coming)

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
        position, for all slots together. What is fed serves the calls that follow, too, and is charged in parts.
        """
        if not self._may_pay(name, drafted, coming):
            return 0, [False] * len(free)
        rate, _, _ = self._best(free, coming)
        price = self.price(coming) * rate * self.token_s(coming)
        call_s = position_s = row_s = 0.0
        if self.adaptive:
            call_s, position_s, row_s = self.costs.call_s(name, 1, sum(n_unfed))
        length = max(len(one) for one in (*free, *drafted))
        mine, other = _table(drafted, length), _table(free, length)  # [n_slots, length]
        most = max(map(len, drafted))
        depths = np.append(_DEPTHS[: _DEPTHS.searchsorted(most)], most)  # [n_depths]
        feeding_s = row_s / self.feeding.n_calls(name) * np.array(n_unfed)[:, None]  # [n_slots, 1]
        gained = np.maximum(mine - price, 0.0).cumsum(1)[:, depths - 1] - rate * feeding_s
        takes = gained > np.maximum(other - price, 0.0).sum(1, keepdims=True)  # [n_slots, n_depths]
        made = np.where(np.arange(length) < depths[:, None, None], mine, 0.0)  # [n_depths, n_slots, length]
        verified = np.where(takes.T[:, :, None], made, other).reshape(len(depths), -1)
        survivals = -np.sort(-verified, 1)  # [n_depths, n_rows], in descending order
        draft_s = call_s + position_s * depths + (takes * feeding_s).sum(0)  # [n_depths]
        seconds = self._seconds(coming, np.arange(1, survivals.shape[1] + 1)) + draft_s[:, None]
        # Of so many rows at best; where there are no more tokens, a wider pass may seem cheaper and cannot be had.
        rates = np.where(survivals > 0.0, (coming.n_ready + survivals.cumsum(1)) / seconds, 0.0)
        rates = np.where(takes.any(0), rates.max(1), -1.0)  # [n_depths]
        best = int(rates.argmax())
        if rates[best] <= rate * (_MARGIN if self.adaptive else 1.0):
            return 0, [False] * len(free)
        return int(depths[best]), takes[:, best].tolist()

    def could_gain(self, name: str, free: Floats, n_most: int, n_unfed: int, coming: Pass) -> bool:
        """Whether a network would be taken for a slot if all its guesses were right; else it need not be tried.

        free: survivals of the draft that the slot has without it, [n_free]. n_most: tokens it may guess at most.
        """
        if not self.adaptive:
            return True
        beside = self._beside_s(coming)

        def rate(n_rows: int, tokens: float, draft_s: float) -> float:
            seconds = beside + self.costs.at(coming.n_rows + n_rows) + draft_s
            return (coming.n_ready + tokens) / seconds

        least = _MARGIN * rate(len(free), float(free.sum()), 0.0)
        call_s, position_s, row_s = self.costs.call_s(name, 1, n_unfed)
        call_s += row_s * n_unfed / self.feeding.n_calls(name)
        depths = {min(n, n_most) for n in _ROWS_OF_A_DRAFT}
        return any(rate(n, n, call_s + n * position_s) > least for n in depths)

    def _may_pay(self, name: str, drafted: Sequence[Floats], coming: Pass) -> bool:
        """Whether all that a network promises would be worth its first position, if rows cost nothing.

        Most networks that do not pay fail here, in a tenth of the time that `depth` takes to find it out.
        """
        if not self.adaptive:
            return True
        worth_s = self.token_s(coming) * float(sum(one.sum() for one in drafted))
        return worth_s > self.costs.draft_s(name, 1) + (_MARGIN - 1.0) * self.costs.at(coming.n_ready)

    def _seconds(self, coming: Pass, n_drafted: NDArray[np.int64]) -> Floats:
        """Seconds of the pass by rows for drafts, without those of the work beside the ready slots."""
        if not self.adaptive:
            return np.ones(len(n_drafted))
        return self._beside_s(coming) + self.costs(coming.n_rows + n_drafted)

    def _beside_s(self, coming: Pass) -> float:
        """Less than zero: the seconds of the work beside the ready slots (prompt chunks), which is not charged to them.

        It makes their rows cost more or less.
        """
        return self.costs.at(coming.n_ready) - self.costs.at(coming.n_rows)

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
