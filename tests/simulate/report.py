"""The table of a run: worst cells first, medians by machine, workload and slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from tests.simulate.cells import Cell

OF_BEST = 0.98  # bars: of the best static setting
OF_PLAIN = 0.99  # of plain decoding
_RATIOS = f"{'÷best':>7} {'late':>6} {'÷plain':>6}"
_HEAD = f"{'machine':<15} {'workload':<13} {'slots':>5} {_RATIOS}"

Key = Callable[[Cell], str]
_GROUPS: Sequence[Key] = (
    lambda one: one.machine,
    lambda one: one.workload,
    lambda one: f"{one.n_slots} slots",
    lambda one: "all",
)


def table(cells: Sequence[Cell], n_worst: int) -> str:
    """All that is shown of the cells."""
    lines = ["worst against the best static setting", f"{_HEAD}  best static       drafted accepted"]
    lines += [_line(one) for one in sorted(cells, key=lambda one: one.ratios()["of_best"])[:n_worst]]
    slowed = [one for one in cells if one.ratios()["of_plain"] < OF_PLAIN]
    if slowed:
        lines += ["", f"slower than plain decoding: {len(slowed)} cells", _HEAD]
        lines += [_line(one) for one in sorted(slowed, key=lambda one: one.ratios()["of_plain"])[:n_worst]]
    lines += [
        "",
        f"{'medians':<20} {'÷best':>7} {'least':>6} {'late':>6} {'÷plain':>6} {'≥0.98':>7}",
    ]
    for key in _GROUPS:
        names = dict.fromkeys(key(one) for one in cells)
        lines += [_medians(name, [one for one in cells if key(one) == name]) for name in names]
    n_rounds = sum(one.n_passes * one.n_slots for one in cells)
    each_ms = 1e3 * sum(one.real_s for one in cells) / n_rounds
    lines += ["", f"{each_ms:.3f} ms of real time per pass and slot of the planner's play"]
    return "\n".join(lines)


def _line(one: Cell) -> str:
    ratios = one.ratios()
    figures = [ratios[key] for key in ("of_best_late", "of_plain")]
    return (
        f"{one.machine:<15} {one.workload:<13} {one.n_slots:>5} {ratios['of_best']:>7.3f}"
        f" {' '.join(f'{figure:>6.3f}' for figure in figures)}"
        f"  {one.static.setting:<17} {one.drafted:>9.2f} {one.accepted:>8.2f}"
    )


def _medians(name: str, cells: Sequence[Cell]) -> str:
    ratios = [one.ratios() for one in cells]
    loaded = [one["of_best"] for one in ratios]
    rest = [median(one[key] for one in ratios) for key in ("of_best_late", "of_plain")]
    n_good = sum(one >= OF_BEST for one in loaded)
    return (
        f"{name:<20} {median(loaded):>7.3f} {min(loaded):>6.3f} {' '.join(f'{one:>6.3f}' for one in rest)}"
        f" {n_good:>3}/{len(cells)}"
    )
