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

SETS: Sequence[tuple[str, ...]] = ((TEXT,), (NETWORK,), (TEXT, NETWORK))
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_HOPELESS = 0.8  # of the set's best so far: longer drafts are not tried then
# Passes of plain decoding a cell's text takes, by slots: more slots learn in fewer passes, and cost more of our time.
PASSES = {1: 4000, 4: 2000, 16: 800, 64: 300}


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per virtual second: of the whole text, and of its second half."""

    whole: float
    late: float
    unasked: float = 0.0  # share of the time in which the network was fed without being asked


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell came to."""

    machine: str
    workload: str
    n_slots: int
    auto: Rate
    plain: Rate
    best: Rate
    setting: str  # of the best
    drafted: float  # tokens per pass and slot, by the planner
    accepted: float
    real_s: float  # of the planner's play
    n_passes: int

    @property
    def of_best(self) -> float:
        return self.auto.whole / self.best.whole

    @property
    def of_best_late(self) -> float:
        return self.auto.late / self.best.late

    @property
    def of_plain(self) -> float:
        return self.auto.whole / self.plain.whole

    def as_json(self) -> dict[str, Any]:
        ratios = {"of_best": self.of_best, "of_best_late": self.of_best_late, "of_plain": self.of_plain}
        return asdict(self) | ratios


def n_passes_of(n_slots: int) -> int:
    """Passes of plain decoding that a cell is played for."""
    return PASSES.get(n_slots, max(150, 4000 // n_slots))


def rate(world: World, n_tokens: int) -> Rate:
    """Play a text of so many tokens."""
    first = world.play(n_tokens=n_tokens // 2)
    second = world.play(n_tokens=n_tokens)
    whole_s = first.seconds + second.seconds
    unasked = (first.unasked_s + second.unasked_s) / whole_s
    return Rate((first.n_tokens + second.n_tokens) / whole_s, second.n_tokens / second.seconds, unasked)


def static(types: Sequence[str], n_max: int) -> MakePlanner:
    """A planner of one setting."""
    return lambda drafters, clock: Static(drafters, types, n_max)


def best_static(scene: Scene, n_tokens: int) -> tuple[Rate, Rate, str]:
    """(plain decoding, the best setting, its name)."""
    plain = rate(World(scene, static((), 0)), n_tokens)
    best, name = plain, "plain"
    for types in SETS:
        of_set = 0.0
        for n_max in LENGTHS:
            found = rate(World(scene, static(types, n_max)), n_tokens)
            of_set = max(of_set, found.whole)
            if found.whole > best.whole:
                best, name = found, f"{'+'.join(types)} {n_max}"
            if found.whole < _HOPELESS * of_set:
                break
    return plain, best, name


def play(machine: Machine, workload: Workload, n_slots: int, *, n_passes: int = 0, seed: int = 0) -> Cell:
    """Play a cell. n_passes: of plain decoding; 0: as many as are usual for so many slots."""
    scene = Scene(machine, workload, n_slots, seed)
    n_tokens = (n_passes or n_passes_of(n_slots)) * n_slots
    started = time.perf_counter()
    world = World(scene, Auto)
    auto = rate(world, n_tokens)
    real_s = time.perf_counter() - started
    plain, best, setting = best_static(scene, n_tokens)
    totals = world.totals
    n_rounds = totals.n_passes * n_slots
    drafted, accepted = totals.n_drafted / n_rounds, totals.n_accepted / n_rounds
    names = machine.name, workload.name, n_slots
    return Cell(*names, auto, plain, best, setting, drafted, accepted, real_s, totals.n_passes)
