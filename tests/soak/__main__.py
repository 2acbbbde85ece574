"""Everything at once for a long time: `make soak`, or `python -m tests.soak [--seconds 3600] [--connections 64]`.

Clients ask a real server on the demo pair for all it can do, leave, return, read slowly, and compare texts. The summary
is written as JSON; status 1 if a request was lost, a text differed, or something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.process import running
from tests.soak.operations import OPERATIONS
from tests.soak.plot import svg
from tests.soak.run import Course, arguments, soak

N_MARKS = 6


def summary(course: Course) -> dict[str, Any]:
    """A run as figures: what was done, and what the server held in the beginning, at every sixth, and in the end."""
    tally, samples = course.tally, course.samples
    times = [course.seconds * mark / N_MARKS for mark in range(N_MARKS + 1)]
    marks = [min(samples, key=lambda one: abs(one.at_s - time)) for time in times if samples]
    return {
        "failures": course.failures(),
        "notes": tally.notes,
        "seconds": round(course.seconds, 1),
        "n_operations": sum(ended.total() for ended in tally.ended.values()),
        "n_texts_compared": tally.n_compared,
        "operations": {kind: dict(tally.ended[kind]) for kind in OPERATIONS if kind in tally.ended},
        "before": course.before.row(),
        "sixths": [one.row() for one in marks],
        "after": course.after.row(),
    }


def main(arguments_: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), metavar="KIND")
    parser.add_argument("--out", type=Path, help="file for the summary; stdout by default")
    parser.add_argument("--plot", type=Path, help="SVG of the samples")
    options = parser.parse_args(arguments_)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running(log, arguments(options.slots, folder)) as server:
            course = asyncio.run(soak(server, options.seconds, options.connections, options.only))
            told = summary(course)
            told["failures"] += [f"in the log: {line}" for line in server.surprises()[:5]]
            if (status := server.stop()) != 0:
                told["failures"].append(f"the server stopped with status {status}")
        if told["failures"]:
            sys.stderr.write(log.read_text(errors="replace")[-8000:])
    text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
    options.out.write_text(text) if options.out else sys.stdout.write(text)
    if options.plot:
        title = f"{options.connections} connections, {options.slots} slots, {told['n_operations']} operations"
        options.plot.write_text(svg([*course.samples, course.after], title))
    return 1 if told["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
