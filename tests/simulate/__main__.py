"""`python -m tests.simulate`: the planner against the best static setting on scripted machines. See README.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.simulate.cells import Cell, play
from tests.simulate.machine import all_machines, read_machine
from tests.simulate.report import table
from tests.simulate.workload import all_workloads, read_workload


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--machines", help="comma list of names; default: all")
    parser.add_argument("--workloads", help="comma list of names; default: all")
    parser.add_argument(
        "--machine-file", type=Path, action="append", default=[], help="machines of other files"
    )
    parser.add_argument(
        "--workload-file", type=Path, action="append", default=[], help="workloads of other files"
    )
    parser.add_argument("--slots", default="1,4,16,64", help="comma list")
    parser.add_argument("--passes", type=int, default=0, help="of plain decoding, per cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--replays", type=int, default=0, help="rate under so many noises that the search has not"
    )
    parser.add_argument("--worst", type=int, default=15, help="cells that the table shows")
    parser.add_argument("--json", type=Path, help="where to write all cells")
    return parser.parse_args(arguments)


def _chosen(known: Mapping[str, Path], names: str | None, files: Sequence[Path]) -> list[Path]:
    """The files of the named scenarios; if only files are given, those alone."""
    if names is None:
        return [*files] if files else [*known.values()]
    if unknown := set(names.split(",")) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return [*(known[name] for name in names.split(",")), *files]


def main(arguments: Sequence[str]) -> int:
    """Play the cells that are asked for."""
    flags = _flags(arguments)
    machines = [read_machine(one) for one in _chosen(all_machines(), flags.machines, flags.machine_file)]
    workloads = [read_workload(one) for one in _chosen(all_workloads(), flags.workloads, flags.workload_file)]
    started, cells = time.perf_counter(), list[Cell]()
    for machine in machines:
        for workload in workloads:
            for n_slots in [int(one) for one in flags.slots.split(",")]:
                sizes = {"n_passes": flags.passes, "seed": flags.seed, "n_replays": flags.replays}
                cells.append(play(machine, workload, n_slots, **sizes))
        print(f"{machine.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(table(cells, flags.worst))
    if flags.json:
        flags.json.write_text(json.dumps([one.as_json() for one in cells], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
