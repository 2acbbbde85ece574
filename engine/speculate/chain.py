"""Several drafters as one: each is asked for slots still without a draft, all are told of every kept token.

The chain is where a drafter's failure stops: it is switched off for the request, and for all after three.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from engine.slot import Slot
from engine.speculate.drafter import NO_DRAFT, Draft, Drafter, Kept, Want
from engine.speculate.length import Lengths

log = logging.getLogger(__name__)

_MOST_FAILURES = 3

T = TypeVar("T")


class Chain:
    """The drafters of a server in their order, with credit for each draft to its author."""

    def __init__(self, drafters: Sequence[Drafter], lengths: Lengths) -> None:
        self._drafters = list(drafters)
        self._lengths = lengths
        self._failures: Counter[str] = Counter()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self._drafters)

    @property
    def disabled(self) -> tuple[str, ...]:
        """Drafters that failed too often and are asked no more."""
        return tuple(name for name in self.names if self._failures[name] >= _MOST_FAILURES)

    def begin(self, slot: Slot) -> None:
        """A request enters a slot, or starts over from its tokens."""
        self._lengths.begin(slot.id)
        for drafter in self._serving(slot):
            self._guard(drafter, [slot], partial(drafter.begin, slot))

    def end(self, slot: Slot) -> None:
        """A request leaves its slot."""
        for drafter in self._serving(slot):
            self._guard(drafter, [slot], partial(drafter.end, slot))

    def draft(self, wants: Sequence[Want], n_rows: int) -> list[Draft]:
        """One draft per want, empty where no drafter has one worth its cost.

        n_rows: rows the coming pass has without any drafts.
        """
        drafts = [NO_DRAFT] * len(wants)
        for drafter in self._drafters:
            open_wants = [
                i for i, want in enumerate(wants) if not drafts[i] and self._serves(drafter, want.slot)
            ]
            for i, draft in zip(
                open_wants, self._ask(drafter, [wants[i] for i in open_wants], n_rows), strict=True
            ):
                if len(draft) >= max(1, wants[i].slot.speculate.n_min):
                    drafts[i] = Draft(draft.token_ids, drafter.name)
        return drafts

    def _ask(self, drafter: Drafter, wants: Sequence[Want], n_rows: int) -> list[Draft]:
        """The drafter's drafts, cut to the lengths that pay."""
        limits = self._lengths.limits(
            drafter.name, [want.slot.id for want in wants], [want.n_max for want in wants], n_rows
        )
        # A draft worth making is asked for at the request's least length, or it would be thrown away.
        limits = [
            min(want.n_max, max(limit, want.slot.speculate.n_min)) if limit > 0 else 0
            for want, limit in zip(wants, limits, strict=True)
        ]
        asked = [Want(want.slot, limit) for want, limit in zip(wants, limits, strict=True) if limit > 0]
        if not asked:
            return [NO_DRAFT] * len(wants)
        started = time.perf_counter()
        made = self._guard(drafter, [want.slot for want in asked], partial(drafter.draft, asked))
        if made is None:
            return [NO_DRAFT] * len(wants)
        depth = max(len(draft) for draft in made)
        if depth:
            self._lengths.drafted(drafter.name, depth, time.perf_counter() - started)
        remaining = iter(made)
        return [next(remaining) if limit > 0 else NO_DRAFT for limit in limits]

    def accept(self, kept: Sequence[Kept]) -> None:
        """Tell every drafter what each slot of the pass gained, and learn how good the drafts were."""
        for one in kept:
            if one.draft:
                self._lengths.judged(one.slot.id, one.draft.source, len(one.draft), one.n_accepted)
        for drafter in self._drafters:
            served = [one for one in kept if self._serves(drafter, one.slot)]
            if served:
                self._guard(
                    drafter,
                    [one.slot for one in served],
                    partial(drafter.accept, served),
                )

    def _serving(self, slot: Slot) -> list[Drafter]:
        return [drafter for drafter in self._drafters if self._serves(drafter, slot)]

    def _serves(self, drafter: Drafter, slot: Slot) -> bool:
        """Whether the slot uses the drafter; one that does not costs it nothing, not even its prompt."""
        return (
            slot.speculate.n_max > 0
            and drafter.name in slot.speculate.types
            and drafter.name not in slot.silenced
            and self._failures[drafter.name] < _MOST_FAILURES
        )

    def _guard(self, drafter: Drafter, slots: Sequence[Slot], call: Callable[[], T]) -> T | None:
        """Run a verb of a drafter. If it raises, its requests go on without it; the text does not change."""
        try:
            return call()
        except Exception:
            self._failures[drafter.name] += 1
            for slot in slots:
                slot.silenced.add(drafter.name)
            log.exception(
                "drafter failed name=%s requests=%s off_for_all=%s",
                drafter.name,
                ",".join(slot.request.id for slot in slots),
                self._failures[drafter.name] >= _MOST_FAILURES,
            )
            return None
