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

from engine.speculate.cost import DraftCost, PassCost
from engine.speculate.offer import worth

Floats = NDArray[np.float64]

_MARGIN = 1.02  # drafts must promise this much more than none, or they are not worth the noise
_ROUNDS = 3
_PROBE_FIRST = 16  # rounds until a drafter that does not pay is tried again
_PROBE_LAST = 256
_PROBE_LENGTH = 4
_SLOPE_ROWS = 16  # rows over which the price of one more is averaged
_FREE = DraftCost()  # of a network that has not drafted yet


@dataclass(frozen=True, slots=True)
class Pass:
    """The coming pass as far as it is known before drafting."""

    n_ready: int  # slots that will gain a token even without drafts
    n_rows: int  # rows without drafts, prompt chunks included


@dataclass(slots=True)
class _Idle:
    """Rounds since a slot's costly drafter was last asked."""

    n_rounds: int = 0
    probe_after: int = _PROBE_FIRST


class Lengths:
    """Draft lengths from survivals and one table of costs. Not adaptive: costs count as nothing, all is verified."""

    def __init__(self, *, adaptive: bool) -> None:
        self.pass_cost = PassCost()
        self._adaptive = adaptive
        self._draft_cost: dict[str, DraftCost] = {}
        self._idle: dict[tuple[int, str], _Idle] = {}

    def begin(self, slot_id: int) -> None:
        """A new request is in the slot."""
        for key in [key for key in self._idle if key[0] == slot_id]:
            del self._idle[key]

    def price(self, coming: Pass, rate: float | None = None) -> float:
        """Tokens that one more row must promise to be worth its time, at `rate` tokens/s or plain decoding's."""
        if not self._adaptive:
            return 0.0
        rows = np.array([coming.n_ready, coming.n_rows, coming.n_rows + _SLOPE_ROWS])
        plain, before, after = self.pass_cost(rows).tolist()
        each: float = (after - before) / _SLOPE_ROWS
        return each * (coming.n_ready / plain if rate is None else rate)

    def trim(self, survivals: Sequence[Floats], coming: Pass) -> list[int]:
        """How many tokens of each draft to verify; survivals hold one array per slot, [n_drafted]."""
        if not self._adaptive or not survivals:
            return [len(one) for one in survivals]
        _, n_taken, order = self._best(survivals, coming)
        owner = np.repeat(np.arange(len(survivals)), [len(one) for one in survivals])
        taken: list[int] = np.bincount(owner[order[:n_taken]], minlength=len(survivals)).tolist()
        return taken

    def depth(
        self, name: str, free: Sequence[Floats], drafted: Sequence[Floats], coming: Pass
    ) -> tuple[int, list[bool]]:
        """How deep a network should draft in this step, and for which slots.

        free: survivals of what each slot has without it, [n_free]; drafted: those expected of the network, [n_max].
        Depth is shared: its cost is one pass of the draft network per position, for all slots together.
        """
        deepest = max(len(one) for one in drafted)
        survival = np.zeros((len(drafted), deepest))  # [n_slots, depth]
        for row, one in zip(survival, drafted, strict=True):
            row[: len(one)] = one
        without, _, _ = self._best(free, coming)
        rate, chosen = without, (0, [False] * len(free))
        for _ in range(_ROUNDS):  # the better the rate, the dearer a row: a few rounds settle it
            found, depth, takes = self._deepest(name, free, survival, coming, rate)
            if found <= rate * (1.0 if chosen[0] else _MARGIN):
                break
            rate, chosen = found, (depth, takes)
        return chosen

    def _deepest(
        self, name: str, free: Sequence[Floats], survival: Floats, coming: Pass, rate: float
    ) -> tuple[float, int, list[bool]]:
        """(tokens per second, depth, slots that take it) if rows are priced at `rate` tokens per second."""
        price = self.price(coming, rate)
        pays = survival > price
        gain = np.cumsum(np.where(pays, survival - price, 0.0), axis=1)  # [n_slots, depth]
        takes = gain > np.array([worth(one, price) for one in free])[:, None]
        paying = [one[one > price] for one in free]
        n_free = np.array([len(one) for one in paying])[:, None]
        t_free = np.array([one.sum() for one in paying])[:, None]
        n_rows = np.where(takes, np.cumsum(pays, axis=1), n_free).sum(0)  # [depth]
        tokens = np.where(takes, np.cumsum(np.where(pays, survival, 0.0), axis=1), t_free).sum(0)
        seconds = self._seconds(coming, n_rows)
        if self._adaptive:
            depths = np.arange(1, survival.shape[1] + 1)
            seconds = seconds + self._draft_cost.get(name, _FREE)(1) * depths
        rates = (coming.n_ready + tokens) / seconds
        best = int(np.argmax(np.where(takes.any(0), rates, -1.0)))
        return float(rates[best]) if takes[:, best].any() else -1.0, best + 1, takes[:, best].tolist()

    def _seconds(self, coming: Pass, n_drafted: NDArray[np.int64]) -> Floats:
        """Seconds of the pass by rows for drafts, without those of the work beside the ready slots.

        That work (prompt chunks) makes rows dearer or cheaper; its own time is not charged to them.
        """
        if not self._adaptive:
            return np.ones(len(n_drafted))
        rows = np.concatenate(([coming.n_ready, coming.n_rows], coming.n_rows + n_drafted))
        alone, before, *_ = seconds = self.pass_cost(rows)
        return np.asarray(alone - before + seconds[2:])

    def _best(self, survivals: Sequence[Floats], coming: Pass) -> tuple[float, int, NDArray[np.int64]]:
        """(tokens per second, drafts to verify, draft tokens in descending order of survival)."""
        flat = np.concatenate(survivals)
        order = np.argsort(-flat, kind="stable")
        tokens = coming.n_ready + np.concatenate(([0.0], np.cumsum(flat[order])))
        rates = tokens / self._seconds(coming, np.arange(len(flat) + 1))
        n_best = int(np.argmax(rates))
        if rates[n_best] < _MARGIN * rates[0]:
            n_best = 0
        return float(rates[n_best]), n_best, order

    def probe(self, slot_id: int, name: str) -> int:
        """Tokens to ask of a drafter that promises too little: none, until it has been left alone long enough."""
        idle = self._idle.setdefault((slot_id, name), _Idle())
        idle.n_rounds += 1
        if not self._adaptive or idle.n_rounds < idle.probe_after:
            return 0
        idle.n_rounds = 0
        idle.probe_after = min(2 * idle.probe_after, _PROBE_LAST)
        return _PROBE_LENGTH

    def restore(self, slot_id: int, name: str) -> None:
        """The drafter is asked for its own worth, or guessed right: if passed over, it is soon tried again."""
        self._idle.pop((slot_id, name), None)

    def drafted(self, name: str, depth: int, seconds: float) -> None:
        """Learn what a drafter's call cost."""
        self._draft_cost.setdefault(name, DraftCost()).observe(depth, seconds)
