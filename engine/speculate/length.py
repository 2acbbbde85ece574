"""How many tokens a drafter should guess: expected tokens per second, from measured acceptance and cost.

A round's drafts 1 … A are accepted and A + 1 is rejected; what follows was never judged. So the *conditional*
rate of each judged token is estimated, with old rounds fading, and shrunk to the server's average for the
drafter. A drafter that does not pay fades to zero and is probed now and then, ever more rarely while it fails.
Source: goodput maximisation (SmartSpec, arXiv 2406.14066), with survival a**k in place of a fitted curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculate.cost import DraftCost, PassCost

_FADE = 0.95  # what a round's evidence is worth to its slot one round later
_FADE_AVERAGE = 0.98  # … and to the server's average, which must outweigh the assumed rate
_PRIOR_WEIGHT = 4.0  # judged tokens that the server's average counts for in a new slot
_PRIOR_RATE = 0.8  # assumed before anything was judged
_PROBE_FIRST = 16  # rounds until a faded drafter is tried again
_PROBE_LAST = 256
_PROBE_LENGTH = 4
_UNPROVEN = 4  # a draft may be this much longer than twice the longest recent accepted run
_MARGIN = 1.02  # a draft must promise this much more than none, or it is not worth the noise


@dataclass(slots=True)
class Evidence:
    """Fading counts of judged and accepted tokens, and how long a faded drafter has been left alone."""

    judged: float = 0.0
    accepted: float = 0.0
    longest: float = 0.0  # accepted run, fading
    n_idle: int = 0
    probe_after: int = _PROBE_FIRST

    def add(self, n_drafted: int, n_accepted: int, fade: float) -> None:
        """One verified draft. Only the first rejected token was judged; those after it were not."""
        self.judged = self.judged * fade + n_accepted + (n_accepted < n_drafted)
        self.accepted = self.accepted * fade + n_accepted
        self.longest = max(self.longest * fade, n_accepted)

    @property
    def reach(self) -> int:
        """Longest draft this evidence can support: a run's depth says more than the average token's rate."""
        return round(_UNPROVEN + 2 * self.longest)


class Lengths:
    """Draft lengths for every (slot, drafter), from one cost table."""

    def __init__(self, *, adaptive: bool) -> None:
        self.pass_cost = PassCost()
        self._adaptive = adaptive
        self._evidence: dict[tuple[int, str], Evidence] = {}
        self._average: dict[str, Evidence] = {}
        self._draft_cost: dict[str, DraftCost] = {}

    def begin(self, slot_id: int) -> None:
        """Forget what the slot's last request taught."""
        for key in [key for key in self._evidence if key[0] == slot_id]:
            del self._evidence[key]

    def rate(self, slot_id: int, name: str) -> float:
        """Probability that a drafted token is accepted, given that those before it were."""
        average = self._average.get(name, Evidence())
        prior = (average.accepted + _PRIOR_WEIGHT * _PRIOR_RATE) / (average.judged + _PRIOR_WEIGHT)
        own = self._evidence.get((slot_id, name), Evidence())
        return (own.accepted + _PRIOR_WEIGHT * prior) / (own.judged + _PRIOR_WEIGHT)

    def limits(self, name: str, slot_ids: Sequence[int], n_max: Sequence[int], n_rows: int) -> list[int]:
        """Draft lengths for the slots a drafter is asked for, in a pass that has `n_rows` rows without drafts."""
        if not self._adaptive:
            return list(n_max)
        return [
            self._limit(name, slot_id, most, n_rows, len(slot_ids))
            for slot_id, most in zip(slot_ids, n_max, strict=True)
        ]

    def _limit(self, name: str, slot_id: int, n_max: int, n_rows: int, n_drafting: int) -> int:
        rate = self.rate(slot_id, name)
        reach = self._evidence.get((slot_id, name), Evidence()).reach
        best, best_gain = 0, _MARGIN / self.pass_cost(n_rows)
        cost = self._draft_cost.get(name, DraftCost())
        tokens = survival = 1.0
        for n in range(1, min(n_max, reach) + 1):
            survival *= rate
            tokens += survival
            # The slots that draft share the pass: each is charged its share, as if all drafted n.
            seconds = self.pass_cost(n_rows + n * n_drafting) + cost(n)
            if tokens / seconds > best_gain:
                best, best_gain = n, tokens / seconds
        return best if best else self._probe(slot_id, name, n_max)

    def _probe(self, slot_id: int, name: str, n_max: int) -> int:
        evidence = self._evidence.setdefault((slot_id, name), Evidence())
        evidence.n_idle += 1
        if evidence.n_idle < evidence.probe_after:
            return 0
        evidence.n_idle = 0
        evidence.probe_after = min(2 * evidence.probe_after, _PROBE_LAST)
        return min(_PROBE_LENGTH, n_max)

    def judged(self, slot_id: int, name: str, n_drafted: int, n_accepted: int) -> None:
        """Learn from one verified draft."""
        own = self._evidence.setdefault((slot_id, name), Evidence())
        own.add(n_drafted, n_accepted, _FADE)
        if n_accepted == n_drafted:
            own.probe_after = _PROBE_FIRST
        self._average.setdefault(name, Evidence()).add(n_drafted, n_accepted, _FADE_AVERAGE)

    def drafted(self, name: str, depth: int, seconds: float) -> None:
        """Learn what a drafter's call cost."""
        self._draft_cost.setdefault(name, DraftCost()).observe(depth, seconds)
