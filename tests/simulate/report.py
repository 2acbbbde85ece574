"""The table of a run: worst cells first, medians by machine, workload and slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from tests.simulate.cells import Cell

_HEAD = f"{'machine':<20} {'workload':<18} {'slots':>5} {'÷best':>6} {'late':>6} {'÷plain':>6} {'fed':>6}"


def table(cells: Sequence[Cell], n_worst: int) -> str:
    """All that is shown of the cells."""
    worst = sorted(cells, key=lambda one: one.of_best)[:n_worst]
    lines = ["worst against the best static setting", f"{_HEAD}  best setting     drafted accepted"]
    lines += [_line(one) for one in worst]
    slowed = sorted((one for one in cells if one.of_plain < 0.99), key=lambda one: one.of_plain)
    if slowed:
        lines += ["", f"slower than plain decoding: {len(slowed)} cells", f"{_HEAD}  best setting"]
        lines += [_line(one) for one in slowed[:n_worst]]
    lines += ["", f"{'medians':<26} {'÷best':>6} {'least':>6} {'late':>6} {'÷plain':>6} {'≥0.98':>7}"]
    groups: Sequence[Callable[[Cell], str]] = (
        lambda one: one.machine,
        lambda one: one.workload,
        lambda one: f"{one.n_slots} slots",
        lambda one: "all",
    )
    for key in groups:
        lines += [_medians(name, [one for one in cells if key(one) == name]) for name in _names(cells, key)]
    n_rounds = sum(one.n_passes * one.n_slots for one in cells)
    real_s = sum(one.real_s for one in cells)
    lines += ["", f"{1e3 * real_s / n_rounds:.3f} ms of real time per pass and slot of the planner"]
    return "\n".join(lines)


def _names(cells: Sequence[Cell], key: Callable[[Cell], str]) -> list[str]:
    return list(dict.fromkeys(key(one) for one in cells))


def _line(one: Cell) -> str:
    return (
        f"{one.machine:<20} {one.workload:<18} {one.n_slots:>5} {one.of_best:>6.3f} {one.of_best_late:>6.3f}"
        f" {one.of_plain:>6.3f} {one.auto.unasked:>6.3f}  {one.setting:<17} {one.drafted:>6.2f} {one.accepted:>8.2f}"
    )


def _medians(name: str, cells: Sequence[Cell]) -> str:
    of_best = [one.of_best for one in cells]
    late, of_plain = (median(getattr(one, what) for one in cells) for what in ("of_best_late", "of_plain"))
    n_good = sum(one >= 0.98 for one in of_best)
    return (
        f"{name:<26} {median(of_best):>6.3f} {min(of_best):>6.3f} {late:>6.3f} {of_plain:>6.3f}"
        f" {n_good:>3}/{len(cells)}"
    )
