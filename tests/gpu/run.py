"""One command for a machine with an NVIDIA GPU: proves the kernels, measures them, and says what failed.

    python -m tests.gpu.run [--out tests/bench/results]

Needs torch, triton, numpy, safetensors, tokenizers and cuda.core, and no network; takes at most nine minutes. Writes
OUT/gpu-name-date.json and .md. Status 1 if anything failed, bars that are missed aside. `--device cpu --quick` runs
every part at tiny sizes: whether the command works, not what a machine is worth.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.report import write
from tests.gpu.supervise import BOXES, GRACE_S, TOTAL_S, Supervisor

ROOT = Path(__file__).parents[2]
PROVING = {"parity", "width", "lossless"}


def main(arguments: Sequence[str] | None = None, child: Sequence[str] = ("-m", "tests.gpu.child")) -> int:
    """The exit status. child: what the working process runs, behind the interpreter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few draws")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "tests/bench/results")
    )
    parser.add_argument("--parts", nargs="*", choices=list(BOXES), default=list(BOXES))
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="of the whole run")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    command = [sys.executable, *child, "--device", options.device, *(["--quick"] if options.quick else [])]
    boxes = {part: seconds for part, seconds in BOXES.items() if part in options.parts}
    progress = Supervisor(command, boxes, options.seconds, GRACE_S).run()
    when = datetime.datetime.now().astimezone()
    files = write(options.out, progress, when, time.monotonic() - started)
    failed = [one for one in progress.findings if one["ok"] is False]
    for one in failed:
        sys.stdout.write(
            f"FAILED {one['part']}: {one['name']}: {one['figures'].get('why', one['figures'])}\n"
        )
    proven = sum(one["ok"] is True for one in progress.findings)
    sys.stdout.write(f"{proven} proven, {len(failed)} failed, {time.monotonic() - started:.0f} s\n")
    sys.stdout.write("".join(f"{file}\n" for file in files))
    wants_proof = not PROVING.isdisjoint(options.parts)
    return 1 if failed or (wants_proof and not proven) else 0


if __name__ == "__main__":
    sys.exit(main())
