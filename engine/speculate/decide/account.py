"""What speculation did lately, counted pass by pass, and why nothing is drafted where that is so.

The same is noted slot by slot for requests that ask. Counts fade without being touched: each pass weighs a little more
than the one before it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from slipstream.engine.drafting import DrafterState, Drafting, Outcome, Treatment, WhyNot
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.decide.survival import MOST_PLACES, Survival
from slipstream.engine.speculate.decide.value import Lengths
from slipstream.engine.speculate.drafter import Drafts, Want
from slipstream.engine.speculate.guard import Guard

log = logging.getLogger(__name__)

_GROWTH = 2.0 ** (1 / 256)  # of a pass's weight, from one to the next
_MOST_WEIGHT = 1e100
_OFF_S = 30.0  # seconds of work without a draft token that are worth a line in the log
_DRAFTED = 0.01  # share of the passes from which on drafting goes on
_TRIED = 0.001  # share of the passes from which on a drafter is not left out
# What may be why a slot drafts nothing, the one that decides first: guesses of a network that promises too little are
# trials.
_RANKS: tuple[WhyNot, ...] = ("plain_measured", "network_too_slow", "rows_too_dear", "no_guess")


class Account:
    """Counts of the passes that could carry drafts, by outcome, length and drafters asked."""

    def __init__(self, guard: Guard, on_device: Sequence[str], lengths: Lengths, survival: Survival) -> None:
        """on_device: drafters that are asked where they promise enough."""
        self._guard, self._survival = guard, survival
        self._costs, self._overlap = lengths.costs, lengths.overlap
        self.n_passes = 0  # decided
        self._weight = 1.0  # of a pass now
        self._outcomes: dict[Outcome, float] = {}
        self._n_outcomes: dict[Outcome, int] = {}
        self._lengths = [0.0] * (MOST_PLACES + 1)  # slots' passes by draft tokens
        self._n_lengths = [0] * (MOST_PLACES + 1)
        self._asked = dict.fromkeys(guard.totals, 0.0)
        self._trusted = dict.fromkeys(on_device, 0.0)  # passes for which it promised enough
        self._n_calls = dict.fromkeys(guard.totals, 0)
        self._promising: set[str] = set()  # drafters on a device that promise enough for the coming pass
        # What was noted for the coming pass: of all slots, and of those whose requests ask.
        self._noted: set[WhyNot] = set()
        self._noted_of: defaultdict[int, set[WhyNot]] = defaultdict(set)
        self.start()
        self._is_off = False  # whether the last pass could carry drafts and did not
        self._off_s = 0.0  # seconds of work in such passes since the last draft
        self._is_logged = False

    def start(self) -> None:
        """Another pass is decided, or the same anew. Drafts that were read since are of an earlier pass."""
        self._has_refused = False  # whether a network promises too little for the coming pass
        self._promising.clear()
        self._noted.clear()
        self._noted_of.clear()

    def note(self, slots: Iterable[Slot], reason: WhyNot) -> None:
        """If nothing is drafted for these slots in the coming pass, this may be why."""
        self._noted.add(reason)
        for slot in slots:
            if slot.request.steps:
                self._noted_of[slot.id].add(reason)

    def reason_of(self, slot: Slot) -> WhyNot:
        """Why nothing is drafted for a slot that could have had drafts, and whose request asks."""
        noted = self._noted_of.get(slot.id, ())
        for reason in _RANKS:
            if reason in noted:
                return reason
        return "not_worth_asking" if self._guard.serving(slot) else "switched_off"

    def consider(self, drafter: str, takes: Sequence[bool]) -> None:
        """A drafter on a device was considered for the coming pass. takes: for each slot whether it promises enough."""
        if any(takes):
            self._promising.add(drafter)
        elif drafter in self._guard.suspects:
            self._has_refused = True

    def drafted(self, wants: Sequence[Want], drafts: Drafts) -> None:
        """The coming pass is decided: what could be drafted, and what was."""
        self._is_off = False
        if not wants:
            return
        self.n_passes += 1
        self._weight *= _GROWTH
        n_drafted = 0
        for want in wants:
            n = len(drafts.by_slot.get(want.slot.id, ()))
            n_drafted += n
            self._lengths[n] += self._weight
            self._n_lengths[n] += 1
        outcome = self._outcome(wants, n_drafted, is_asked=self._count_asked())
        self._outcomes[outcome] = self._outcomes.get(outcome, 0.0) + self._weight
        self._n_outcomes[outcome] = self._n_outcomes.get(outcome, 0) + 1
        for name in self._promising:
            self._trusted[name] += self._weight
        self._is_off = n_drafted == 0
        if n_drafted and self._off_s:
            self._resume()
        if self._weight > _MOST_WEIGHT:
            self._rescale()

    def _count_asked(self) -> bool:
        """Whether any drafter was asked for a guess since the last pass."""
        is_asked = False
        for name, tally in self._guard.totals.items():
            n = tally.n_calls["draft"]
            if n != self._n_calls[name]:
                is_asked = True
                self._n_calls[name] = n
                self._asked[name] += self._weight
        return is_asked

    def _outcome(self, wants: Sequence[Want], n_drafted: int, *, is_asked: bool) -> Outcome:
        if n_drafted:
            return "drafted"
        if "plain_measured" in self._noted:
            return "plain_measured"
        if self._has_refused:  # its guesses, if any, are trials
            return "network_too_slow"
        if "rows_too_dear" in self._noted:
            return "rows_too_dear"
        if is_asked:
            return "no_guess"
        if any(self._guard.serving(want.slot) for want in wants):
            return "not_worth_asking"
        return "switched_off"

    def worked(self, seconds: float) -> None:
        """The last pass took so long."""
        if not self._is_off:
            return
        self._off_s += seconds
        if self._off_s > _OFF_S and not self._is_logged:
            self._is_logged = True
            names = ",".join(self._asked)
            log.info("drafting stopped seconds=%.0f reason=%s drafters=%s", self._off_s, self._chief(), names)

    def _resume(self) -> None:
        if self._is_logged:
            log.info("drafting resumed seconds=%.0f", self._off_s)
        self._off_s, self._is_logged = 0.0, False

    def _rescale(self) -> None:
        self._outcomes = {outcome: count / self._weight for outcome, count in self._outcomes.items()}
        for counts in (self._asked, self._trusted):
            counts.update({name: count / self._weight for name, count in counts.items()})
        self._lengths = [count / self._weight for count in self._lengths]
        self._weight = 1.0

    def report(self, slots: Sequence[Slot]) -> Drafting:
        """All of it. slots: those with a request."""
        n_lately = sum(self._outcomes.values()) or 1.0
        deepest = max((i for i, n in enumerate(self._n_lengths) if n), default=-1)
        return Drafting(
            why_not=self._why_not(slots),
            drafted_share=self._outcomes.get("drafted", 0.0) / n_lately,
            off_s=self._off_s,
            widths=self._costs.widths(),
            gap_s=self._overlap.gap_s,
            drafters={name: self._state(name, n_lately) for name in self._asked},
            lengths=[one / self._weight for one in self._lengths[: deepest + 1]],
            n_lengths=self._n_lengths[: deepest + 1],
            n_outcomes=dict(self._n_outcomes),
        )

    def _why_not(self, slots: Sequence[Slot]) -> WhyNot | None:
        if not self._asked:
            return "no_drafter"
        is_wanted = any(slot.speculate.types and slot.speculate.n_max for slot in slots)
        if not self._outcomes or (slots and not is_wanted):
            return "not_asked_for"
        n_drafted = self._outcomes.get("drafted", 0.0)
        return None if n_drafted >= _DRAFTED * sum(self._outcomes.values()) else self._chief()

    def _chief(self) -> WhyNot:
        """The most frequent reason lately; there is one."""
        reasons = {outcome: n for outcome, n in self._outcomes.items() if outcome != "drafted"}
        return max(reasons, key=reasons.__getitem__)

    def _state(self, name: str, n_lately: float) -> DrafterState:
        share = self._asked[name] / n_lately
        call_s, position_s, row_s = self._costs.call_s(name)
        return DrafterState(
            treatment=self._treatment(name, share, self._trusted.get(name, self._asked[name]) / n_lately),
            asked_share=min(1.0, share),
            guess_s=position_s if name in self._guard.suspects else call_s,
            fed_row_s=row_s,
            places=self._survival.places(name),
        )

    def _treatment(self, name: str, share: float, sure_share: float) -> Treatment:
        if name in self._guard.disabled:
            return "switched_off"
        if sure_share > 0.5:
            return "asked"
        return "tried" if share > _TRIED else "left_out"
