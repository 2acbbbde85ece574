"""A few cells against the bars; `python -m tests.simulate` plays all of them."""

from __future__ import annotations

import pytest

from tests.simulate.cells import play
from tests.simulate.machine import all_machines, read_machine
from tests.simulate.report import OF_BEST, OF_PLAIN
from tests.simulate.workload import all_workloads, read_workload

CELLS = [
    ("laptop-04b", "copying", 1),
    ("laptop-8b", "random", 1),
    ("laptop-8b", "moods", 4),
    ("h100-8b", "network-08", 4),
    ("h100-70b", "mixed", 16),
    ("moe-30b", "short", 4),
    ("tiny-demo", "random", 16),
    ("dear-network", "editing", 1),
]


@pytest.mark.parametrize(("machine", "workload", "n_slots"), CELLS)
def test_the_planner_is_as_good_as_the_best_static_setting(machine: str, workload: str, n_slots: int) -> None:
    cell = play(
        read_machine(all_machines()[machine]),
        read_workload(all_workloads()[workload]),
        n_slots,
        n_passes=1600 // n_slots,
    )
    ratios, setting = cell.ratios(), cell.static.setting
    assert ratios["of_plain"] >= OF_PLAIN
    assert ratios["of_best"] >= OF_BEST, f"{ratios['of_best']:.3f} of {setting}"
