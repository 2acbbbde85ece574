"""Why a slot drafts nothing in the coming pass, for requests that ask: `Account` has the same of whole passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from slipstream.engine.drafting import WhyNot
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.guard import Guard

# What may be the reason, the one that decides first: guesses of a network that promises too little are trials.
_RANKS: tuple[WhyNot, ...] = ("plain_measured", "network_too_slow", "rows_too_dear", "no_guess")


class Reasons:
    """What may be why nothing is drafted, noted slot by slot while a pass is decided."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._noted: defaultdict[int, set[WhyNot]] = defaultdict(set)

    def clear(self) -> None:
        """Another pass is decided."""
        self._noted.clear()

    def note(self, slots: Iterable[Slot], reason: WhyNot) -> None:
        """If nothing is drafted for these slots, this may be why."""
        for slot in slots:
            if slot.request.steps:
                self._noted[slot.id].add(reason)

    def of(self, slot: Slot) -> WhyNot:
        """Why nothing is drafted for a slot that could have had drafts."""
        noted = self._noted.get(slot.id, ())
        for reason in _RANKS:
            if reason in noted:
                return reason
        return "not_worth_asking" if self._guard.serving(slot) else "switched_off"
