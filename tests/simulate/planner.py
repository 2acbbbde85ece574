"""What the simulator uses of the planner: this file alone knows the names of `core/plan.py`, the chain and `decide`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from slipstream.engine.core import plan
from slipstream.engine.core.plan import Place, Work
from slipstream.engine.core.warm import ENOUGH_S, seconds_by_width
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.cost import WIDTHS
from slipstream.engine.speculate.decide.value import Lengths, Pass
from slipstream.engine.speculate.drafter import Draft, Drafter, Kept, Want
from tests.simulate.clock import Clock

MOST_DRAFTED = 16  # `--draft-max`
_PAGE = 1  # prompt chunks end anywhere

Verified = tuple[Work, int]  # what ran for a slot, and how many of its drafts were accepted

__all__ = [
    "Auto",
    "Pass",
    "Place",
    "Planner",
    "Verified",
    "Want",
    "Work",
    "fixed",
    "measured",
    "outline",
    "works_of",
]


class Planner(Protocol):
    """Who decides what is drafted."""

    types: tuple[str, ...]  # drafters of its requests
    n_max: int  # of its requests

    def warm_up(self, seconds_of: Callable[[int], float], most: int) -> None:
        """Before the first request. seconds_of: runs a pass of so many rows, at most `most`."""

    def begin(self, slot: Slot) -> None:
        """A request enters a slot."""

    def draft(self, wants: Sequence[Want], coming: Pass) -> Mapping[int, Draft]:
        """Drafts by slot id; drafters move the clock on."""

    def measured(self, n_rows: int, seconds: float) -> None:
        """What a pass seems to have cost."""

    def settle(self, verified: Sequence[Verified], coming: Pass) -> None:
        """A pass was verified; the slots hold what was kept."""

    def end(self, slot: Slot) -> None:
        """A request leaves its slot."""


def outline(places: Sequence[Place], budget: int) -> tuple[list[Want], Pass]:
    """Who may draft, and the rest of the coming pass."""
    return plan.wants(places, budget), plan.without_drafts(places, budget)


def works_of(places: Sequence[Place], drafts: Mapping[int, Draft], budget: int) -> list[Work]:
    """What runs in the pass."""
    return plan.work(places, drafts, budget, _PAGE)


def measured(seconds_of: Callable[[int], float], most: int) -> dict[int, float]:
    """Seconds of passes of every width before the first request, as the engine warms up."""
    return seconds_by_width([n_rows for n_rows in WIDTHS if n_rows <= most], seconds_of, ENOUGH_S)


class Auto:
    """The server's own planner."""

    def __init__(
        self, drafters: Sequence[Drafter], clock: Clock, chain: Chain | None = None, n_max: int = MOST_DRAFTED
    ) -> None:
        """chain: another than the server's."""
        self.types = tuple(one.name for one in drafters)
        self.n_max = n_max
        self._chain = chain or Chain(drafters, Lengths(adaptive=True), now=clock.now)

    def warm_up(self, seconds_of: Callable[[int], float], most: int) -> None:
        for n_rows, seconds in measured(seconds_of, most).items():
            self._chain.lengths.costs.passed(n_rows, seconds)

    def begin(self, slot: Slot) -> None:
        self._chain.begin(slot)

    def draft(self, wants: Sequence[Want], coming: Pass) -> Mapping[int, Draft]:
        drafts = self._chain.draft(wants, coming)
        assert drafts is not None
        return drafts.by_slot

    def measured(self, n_rows: int, seconds: float) -> None:
        self._chain.lengths.costs.passed(n_rows, seconds)

    def settle(self, verified: Sequence[Verified], coming: Pass) -> None:
        for work, n_accepted in verified:
            if work.n_picks:
                self._chain.credit(work.slot, work.draft, n_accepted, coming)
        self._chain.accept(
            [Kept(work.slot, work.draft, n_accepted, work.start) for work, n_accepted in verified]
        )

    def end(self, slot: Slot) -> None:
        self._chain.end(slot)


def fixed(drafters: Sequence[Drafter], clock: Clock, n_max: int) -> Auto:
    """The chain in fixed order and without adaptation: what `Static` stands for."""
    chain = Chain(drafters, Lengths(adaptive=False), by_value=False, now=clock.now)
    return Auto(drafters, clock, chain, n_max)
