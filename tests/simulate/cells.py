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
from tests.simulate.world import MakePlanner, Scene, World

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_HOPELESS = 0.8  # of the set's best so far: longer drafts are not tried then
# Passes of plain decoding a cell's text takes, by slots: more slots learn in fewer passes, and cost more of our time.
PASSES = {1: 4000, 4: 2000, 16: 800, 64: 300}


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per virtual second: of the whole text, and of its second half."""

    whole: float
    late: float


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


def rate(world: World, n_tokens: int) -> Rate:
    """Play a text of so many tokens."""
    first = world.play(n_tokens=n_tokens // 2)
    second = world.play(n_tokens=n_tokens)
    whole_s = first.seconds + second.seconds
    return Rate((first.n_tokens + second.n_tokens) / whole_s, second.n_tokens / second.seconds)


def static(types: Sequence[str], n_max: int) -> MakePlanner:
    """A planner of one setting."""
    return lambda drafters, clock: Static(drafters, types, n_max)


def references(scene: Scene, n_tokens: int) -> References:
    """The best static settings, by search."""

    def found(types: Sequence[str], n_max: int) -> Rate:
        return rate(World(scene, static(types, n_max)), n_tokens)

    def best_of(types: Sequence[str]) -> tuple[Rate, int]:
        best, best_n = found(types, LENGTHS[0]), LENGTHS[0]
        for n_max in LENGTHS[1:]:
            one = found(types, n_max)
            if one.whole < _HOPELESS * best.whole:
                break
            if one.whole > best.whole:
                best, best_n = one, n_max
        return best, best_n

    plain = found((), 0)
    all_types = ((TEXT,), (NETWORK,), (TEXT, NETWORK))
    known = [(plain, "plain")]
    for types in all_types:
        one, n_max = best_of(types)
        known.append((one, f"{'+'.join(types)} {n_max}"))
    best, setting = max(known, key=lambda pair: pair[0].whole)
    return References(plain, best, setting)


def play(machine: Machine, workload: Workload, n_slots: int, *, n_passes: int = 0, seed: int = 0) -> Cell:
    """Play a cell. n_passes: of plain decoding; 0: as many as are usual for so many slots."""
    scene = Scene(machine, workload, n_slots, seed)
    n_tokens = (n_passes or n_passes_of(n_slots)) * n_slots
    started = time.perf_counter()
    world = World(scene, Auto)
    auto = rate(world, n_tokens)
    real_s = time.perf_counter() - started
    totals = world.totals
    n_rounds = totals.n_passes * n_slots
    drafted, accepted = totals.n_drafted / n_rounds, totals.n_accepted / n_rounds
    names = machine.name, workload.name, n_slots
    return Cell(*names, auto, references(scene, n_tokens), drafted, accepted, real_s, totals.n_passes)
