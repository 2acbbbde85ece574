"""A few short cells, so that the planner does not become worse unseen; `python -m tests.simulate` plays all of them.

The bars are 0.98 of the best static setting and 0.99 of plain decoding over a cell's whole length. Not every cell
reaches them (`docs/notes.md`), and a tenth of the length learns less; the floors are a little below what is reached.
"""

from __future__ import annotations

import pytest

from tests.simulate.cells import play
from tests.simulate.machine import all_machines, read_machine
from tests.simulate.workload import all_workloads, read_workload

ABOUT = ("engine/speculate/decide/*.py", "engine/speculate/chain.py")

OF_BEST, OF_PLAIN = 0.93, 0.95

CELLS = [
    ("laptop-04b", "copying", 1),
    ("laptop-8b", "random", 1),
    ("laptop-8b", "moods", 4),
    ("h100-8b", "network-08", 4),
    ("h100-70b", "mixed", 16),
    ("moe-30b", "short", 4),
    ("tiny-demo", "random", 16),
    ("dear-network", "editing", 1),
    ("h100-8b", "apart", 4),
]


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize(("machine", "workload", "n_slots"), CELLS)
def test_the_planner_is_near_the_best_static_setting(machine: str, workload: str, n_slots: int) -> None:
    cell = play(
        read_machine(all_machines()[machine]),
        read_workload(all_workloads()[workload]),
        n_slots,
        n_passes=1600 // n_slots,
    )
    ratios, setting = cell.ratios(), cell.static.setting
    assert ratios["of_plain"] >= OF_PLAIN
    assert ratios["of_best"] >= OF_BEST, f"{ratios['of_best']:.3f} of {setting}"
