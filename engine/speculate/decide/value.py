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
_ROUNDS = 3
_SLOPE_ROWS = 16  # rows over which the price of one more row is averaged


@dataclass(frozen=True, slots=True)
class Pass:
    """The coming pass as far as it is known before drafting."""

    n_ready: int  # slots that will gain a token even without drafts
    n_rows: int  # rows without drafts, prompt chunks included


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

    def price(self, coming: Pass, rate: float | None = None) -> float:
        """Tokens that one more row must promise to be worth its time, at `rate` tokens/s or plain decoding's."""
        if not self.adaptive:
            return 0.0
        at = self.costs.at
        each = max(0.0, at(coming.n_rows + _SLOPE_ROWS) - at(coming.n_rows)) / _SLOPE_ROWS
        return each / self.token_s(coming) if rate is None else each * rate

    def trim(self, survivals: Sequence[Floats], coming: Pass) -> list[int]:
        """How many tokens of each draft to verify; survivals hold one array per slot, [n_drafted]."""
        if not self.adaptive or not any(len(one) for one in survivals):
            return [len(one) for one in survivals]
        _, n_taken, order = self._best(survivals, coming)
        owner = np.arange(len(survivals)).repeat([len(one) for one in survivals])
        taken: list[int] = np.bincount(owner[order[:n_taken]], minlength=len(survivals)).tolist()
        return taken

    def depth(
        self, name: str, free: Sequence[Floats], drafted: Sequence[Floats], coming: Pass
    ) -> tuple[int, list[bool]]:
        """How deep a network should draft in this step, and for which slots.

        free: survivals of what each slot has without it, [n_free]; drafted: those expected of the network, [n_max].
        Depth is shared: its cost is one pass of the draft network per position, for all slots together.
        """
        if not self._may_pay(name, drafted, coming):
            return 0, [False] * len(free)
        survival = _table(drafted)  # [n_slots, depth]
        known = _table(free)  # [n_slots, most of n_free]
        without, _, _ = self._best(free, coming)
        rate, chosen = without, (0, [False] * len(free))
        for _ in range(_ROUNDS):  # the better the rate, the higher a row's price: a few rounds settle it
            found, depth, takes = self._deepest(name, known, survival, coming, rate)
            if found <= rate * (_MARGIN if self.adaptive and not chosen[0] else 1.0):
                break
            rate, chosen = found, (depth, takes)
        return chosen

    def _may_pay(self, name: str, drafted: Sequence[Floats], coming: Pass) -> bool:
        """Whether all that a network promises would be worth its first position, if rows cost nothing.

        Most networks that do not pay fail here, in a tenth of the time that `depth` takes to find it out.
        """
        if not self.adaptive:
            return True
        worth_s = self.token_s(coming) * float(sum(one.sum() for one in drafted))
        return worth_s > self.costs.draft_s(name, 1) + (_MARGIN - 1.0) * self.costs.at(coming.n_ready)

    def _deepest(
        self, name: str, free: Floats, survival: Floats, coming: Pass, rate: float
    ) -> tuple[float, int, list[bool]]:
        """(tokens per second, depth, slots that take it) if rows are priced at `rate` tokens per second."""
        price = self.price(coming, rate)
        pays = survival > price
        gain = np.where(pays, survival - price, 0.0).cumsum(1)  # [n_slots, depth]
        pays_free = free > price
        n_free = pays_free.sum(1, keepdims=True)  # [n_slots, 1]
        t_free = np.where(pays_free, free, 0.0).sum(1, keepdims=True)
        takes = gain > t_free - price * n_free
        n_rows = np.where(takes, pays.cumsum(1), n_free).sum(0)  # [depth]
        tokens = np.where(takes, np.where(pays, survival, 0.0).cumsum(1), t_free).sum(0)
        seconds = self._seconds(coming, n_rows)
        if self.adaptive:
            depths = np.arange(1, survival.shape[1] + 1)
            seconds = seconds + self.costs.draft_s(name, 1) * depths
        rates = (coming.n_ready + tokens) / seconds
        able = np.where(takes.any(0), rates, -1.0)
        # Of equal rates the least depth; where costs count as nothing the greatest, however little it promises.
        best = int(able.argmax()) if self.adaptive else len(able) - 1 - int(able[::-1].argmax())
        return float(rates[best]) if takes[:, best].any() else -1.0, best + 1, takes[:, best].tolist()

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
