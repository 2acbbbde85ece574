"""Plants each fault of the catalogue in a copy of the tree, and runs the tests that are to find it.

    python -m tests.mutants [NAME …] [--list]

First all of these tests run on the copy as it is, and have to pass. Ends with 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import ROOT, Fault, faults

LIMIT_S = 300.0  # of one run of tests; a fault by which they hang is found too
# pytest's exit codes; others say that the tests could not be run.
PASSED, FAILED, NONE_RAN = 0, 1, 5
FIRST_RED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of tests ended."""

    code: int | None  # pytest's; None: it took too long
    seconds: float
    text: str

    @property
    def is_red(self) -> bool:
        return self.code in (FAILED, None)

    @property
    def culprit(self) -> str:
        """What turned red first."""
        found = FIRST_RED.search(self.text)
        return "took too long" if self.code is None else found[1] if found else f"exit code {self.code}"


class Copy:
    """A copy of the tree's files as git knows them, changed or not, and of the links between its folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name, follow_symlinks=False)

    def run(self, tests: Sequence[str], *, limit_s: float | None = LIMIT_S, whole: bool = False) -> Run:
        """Run tests in the copy, of marked ones a sample; under a limit of time only up to the first failure.

        whole: all cases of marked ones.
        """
        started = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--whole" if whole else "--extra-s=0",
            *tests,
        ]
        # Compiled kernels lie in the copy, so that no other process finds those of a fault.
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(self.root / "numba"),
            "OMP_NUM_THREADS": "1",
        }
        try:
            done = subprocess.run(
                command if limit_s is None else [*command, "-x"],
                cwd=self.root,
                env=environment,
                capture_output=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Run(None, time.perf_counter() - started, "")
        if done.returncode == NONE_RAN and not whole:  # while nothing changes their sample has no case
            return self.run(tests, whole=True, limit_s=limit_s)
        said = (done.stdout + done.stderr).decode(errors="replace")
        return Run(done.returncode, time.perf_counter() - started, said)

    def run_with(self, fault: Fault) -> Run:
        """Run the fault's tests while it is planted: all cases, where a sample does not find it."""
        path = self.root / fault.file
        before = path.read_bytes()
        path.write_text(fault.planted(self.root), encoding="utf-8")
        try:
            run = self.run(fault.tests)
            return self.run(fault.tests, whole=True) if run.code == PASSED else run
        finally:
            path.write_bytes(before)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="of the faults to plant; all of them by default")
    parser.add_argument("--list", action="store_true", help="say which there are, and plant none")
    asked = parser.parse_args(arguments)
    known = {one.name: one for one in faults()}
    if unknown := set(asked.names) - set(known):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in asked.names or known]
    if asked.list:
        for one in chosen:
            print(f"{one.name}: {one.file}: {one.why}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return _plant(Copy(Path(folder)), chosen)


def _plant(copy: Copy, chosen: Sequence[Fault]) -> int:
    """The exit code."""
    tests = sorted({test for one in chosen for test in one.tests})
    sound = copy.run(tests, limit_s=None)
    print(
        f"{'green' if sound.code == PASSED else 'BROKEN':9} {sound.seconds:5.1f} s  all of the tests, without a fault"
    )
    if sound.code != PASSED:
        print(sound.text[-4000:])
        return 1
    missed = []
    for one in chosen:
        run = copy.run_with(one)
        print(
            f"{'red' if run.is_red else 'NOT FOUND':9} {run.seconds:5.1f} s  {one.name}  {run.culprit}",
            flush=True,
        )
        if not run.is_red:
            print(run.text[-1000:])
            missed.append(one.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted faults found")
    if missed:
        print(f"not found: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
