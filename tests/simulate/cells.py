"""A cell: one machine, one workload, so many slots; the planner against the best static setting and plain decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.simulate.machine import Machine
from tests.simulate.planner import Auto
from tests.simulate.static import Static
from tests.simulate.workload import NETWORK, TEXT, Workload
from tests.simulate.world import MakePlanner, Scene, Totals, World

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_HOPELESS = 0.8  # of the set's best so far: longer drafts are not tried then
_FINALISTS = 3  # settings that are played again
Setting = tuple[tuple[str, ...], int]  # types, length
_PLAIN: Setting = (), 0
# Passes of plain decoding a cell's text takes, by slots: more slots learn in fewer passes, and cost more of our time.
PASSES = {1: 4000, 4: 2000, 16: 800, 64: 300}


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per virtual second: of the whole text, and of its second half."""

    whole: float
    late: float

    @classmethod
    def of(cls, plays: Sequence[tuple[Totals, Totals]]) -> Rate:
        """Over several plays of a text, each in two halves."""
        return cls(_rate([half for play in plays for half in play]), _rate([late for _, late in plays]))


@dataclass(frozen=True, slots=True)
class References:
    """Static settings over the same text."""

    plain: Rate
    best: Rate
    setting: str  # of the best


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell came to."""

    machine: str
    workload: str
    n_slots: int
    auto: Rate
    static: References
    drafted: float  # tokens per pass and slot, by the planner
    accepted: float
    real_s: float  # of the planner's play
    n_passes: int

    def ratios(self) -> dict[str, float]:
        """The planner against the references."""
        static = self.static
        return {
            "of_best": self.auto.whole / static.best.whole,
            "of_best_late": self.auto.late / static.best.late,
            "of_plain": self.auto.whole / static.plain.whole,
        }

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | self.ratios()


def n_passes_of(n_slots: int) -> int:
    """Passes of plain decoding that a cell is played for."""
    return PASSES.get(n_slots, max(150, 4000 // n_slots))


def _rate(parts: Sequence[Totals]) -> float:
    return sum(one.n_tokens for one in parts) / sum(one.seconds for one in parts)


def halves(world: World, n_tokens: int) -> tuple[Totals, Totals]:
    """Play a text of so many tokens."""
    return world.play(n_tokens=n_tokens // 2), world.play(n_tokens=n_tokens)


def static(types: Sequence[str], n_max: int) -> MakePlanner:
    """A planner of one setting."""
    return lambda drafters, clock: Static(drafters, types, n_max)


def references(scenes: Sequence[Scene], n_tokens: int) -> References:
    """The best static settings, found by search in the first scene; if there are more, rated in those.

    A search returns the setting that was best or luckiest. Where noise is large and a cell short, luck is several per
    cent; so the best few are played again, under noises in which none was chosen.
    """

    def found(setting: Setting, among: Sequence[Scene]) -> Rate:
        return Rate.of([halves(World(one, static(*setting)), n_tokens) for one in among])

    known: dict[Setting, Rate] = {_PLAIN: found(_PLAIN, scenes[:1])}
    for types in ((TEXT,), (NETWORK,), (TEXT, NETWORK)):
        best = 0.0
        for n_max in LENGTHS:
            one = known[types, n_max] = found((types, n_max), scenes[:1])
            if one.whole < _HOPELESS * best:
                break
            best = max(best, one.whole)
    if len(scenes) > 1:
        last = sorted(known, key=lambda setting: known[setting].whole, reverse=True)[:_FINALISTS]
        known = {setting: found(setting, scenes[1:]) for setting in dict.fromkeys((_PLAIN, *last))}
    (types, n_max), rate = max(known.items(), key=lambda pair: pair[1].whole)
    return References(known[_PLAIN], rate, f"{'+'.join(types)} {n_max}" if types else "plain")


def play(
    machine: Machine,
    workload: Workload,
    n_slots: int,
    *,
    n_passes: int = 0,
    seed: int = 0,
    n_replays: int = 0,
) -> Cell:
    """Play a cell.

    n_passes: of plain decoding; 0: as many as are usual for so many slots. n_replays: under so many noises of the
    machine that the search has not; 0: under the search's.
    """
    scenes = [Scene(machine, workload, n_slots, seed, noise) for noise in range(1 + n_replays)]
    n_tokens = (n_passes or n_passes_of(n_slots)) * n_slots
    started = time.perf_counter()
    worlds = [World(one, Auto) for one in scenes[1:] or scenes]
    auto = Rate.of([halves(one, n_tokens) for one in worlds])
    real_s = time.perf_counter() - started
    totals = [one.totals for one in worlds]
    n_played = sum(one.n_passes for one in totals)
    n_rounds = n_played * n_slots
    drafted = sum(one.n_drafted for one in totals) / n_rounds
    accepted = sum(one.n_accepted for one in totals) / n_rounds
    names = machine.name, workload.name, n_slots
    return Cell(*names, auto, references(scenes, n_tokens), drafted, accepted, real_s, n_played)
