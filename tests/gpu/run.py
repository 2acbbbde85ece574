"""One command for a machine with an NVIDIA GPU: proves the kernels, measures them, and says what failed.

    python3 -m tests.gpu.run [--out tests/bench/results] [--only speed counters]

Needs torch, triton, numpy, safetensors, tokenizers and cuda.core; no network, no make, nothing set up. Takes nine
minutes at most, what is wanted most first; --only picks parts for a second run. OUT/gpu-name-date.json and .md are
written as results come, so that nothing is lost if the run is killed. Status 1 if anything failed; what there was no
time for and bars that are missed are only listed. `--device cpu --quick` runs every part at tiny sizes: whether the
command works, not what a machine is worth.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.parts import GRACE_S, PARTS, TOTAL_S
from tests.gpu.report import Report, bars, named, table, unmeasured
from tests.gpu.supervise import Progress, Supervisor

ROOT = Path(__file__).parents[2]
ALWAYS = ("machine",)
PROVING = {"selfcheck", "parity", "width", "replays", "lossless", "parity-wide", "width-wide"}


def main(arguments: Sequence[str] | None = None, child: Sequence[str] = ("-m", "tests.gpu.child")) -> int:
    """The exit status. child: what the working process runs, behind the interpreter."""
    options = parser().parse_args(arguments)
    command = [sys.executable, *child, "--device", options.device, *(["--quick"] if options.quick else [])]
    # Results are named after the machine, and those of some parts after these as well.
    parts = {name: part for name, part in PARTS.items() if name in (*ALWAYS, *options.only)}
    report = Report(options.out, [] if options.only == list(PARTS) else options.only)
    progress = Supervisor(command, parts, options.seconds, GRACE_S, report.write).run()
    files = report.close(progress)
    n_failed = summarise(progress, report.seconds)
    sys.stdout.write("".join(f"{file}\n" for file in files))
    proven = any(one["ok"] is True for one in progress.findings)
    return 1 if n_failed or (not PROVING.isdisjoint(parts) and not proven) else 0


def parser() -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--device", default="cuda")
    known.add_argument("--quick", action="store_true", help="tiny sizes and few draws")
    default = Path(os.environ.get("OUT") or ROOT / "tests/bench/results")
    known.add_argument("--out", type=Path, default=default)
    known.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    known.add_argument("--seconds", type=float, default=TOTAL_S, help="of the whole run")
    return known


def summarise(progress: Progress, seconds: float) -> int:
    """Print what failed, what was not measured, and the bars last; returns the number of failures."""
    failed = [one for one in progress.findings if one["ok"] is False]
    missing = unmeasured(progress)
    for mark, records in (("FAILED", failed), ("NOT MEASURED", missing)):
        for one in records:
            sys.stdout.write(f"{mark} {named(one)}: {one['figures'].get('why', one['figures'])}\n")
    proven = sum(one["ok"] is True for one in progress.findings)
    goals = bars(progress)
    counted = f"{proven} proven, {len(failed)} failed, {len(missing)} not measured, {seconds:.0f} s"
    sys.stdout.write("\n".join((counted, *(table(goals) if goals else ()), "")))
    return len(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the run was ended"))  # and the working process with it
    sys.exit(main())
