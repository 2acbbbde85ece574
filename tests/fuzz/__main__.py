"""Everything at once against a server of its own: `python -m tests.fuzz [--seconds 30] [--examples 40] [--seed N]`.

Schemathesis and the mutator against the demo pair behind an API key, then the mutator against the fake engine, which
is many times faster. Afterwards the servers must be idle, have logged no exception, and stop with status 0. Grammars
are also followed without a server, where each call can be timed, and damaged GGUF files are loaded.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz import gguf, grammars, mutate, schema
from tests.process import DEMO, FAKE, SERVER, Running, running

KEY = "fuzz"
# Short contexts, so that a request without a limit ends soon.
LIMITS = ("--ctx-size", "256", "--parallel", "4", "--api-key", KEY, "--log-level", "warning")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of mutation, shared by both engines")
    parser.add_argument("--examples", type=int, default=40, help="random cases per operation of the document")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    mutating = ("--key", KEY, "--seed", str(seed), "--seconds", str(options.seconds / 2))
    faults = grammars.main(["--seed", str(seed), "--seconds", str(options.seconds / 4)])
    faults += gguf.main(["--seed", str(seed)])
    with tempfile.TemporaryDirectory() as folder:
        saved = ("--slot-save-path", folder)
        with running(Path(folder) / "demo.log", (*DEMO, *LIMITS, *saved), SERVER) as one:
            faults += schema.main(
                [one.url, "--key", KEY, "--seed", str(seed), "--examples", str(options.examples)]
            )
            faults += mutate.main([one.url, *mutating])
            faults += _end(one)
        with running(Path(folder) / "fake.log", ("-m", "FAST", *LIMITS[2:], *saved), FAKE) as one:
            faults += mutate.main([one.url, *mutating])
            faults += _end(one)
    sys.stdout.write("nothing found\n" if not faults else f"{faults} of 7 parts found something\n")
    return 1 if faults else 0


def _end(one: Running) -> int:
    """1 if the server is not as it should be after all that."""
    found = [f"in the log: {line}" for line in one.surprises()[:5]]
    if one.process.poll() is not None:
        found.append(f"the server has ended with status {one.process.returncode}")
    elif (status := one.stop()) != 0:
        found += [f"the server stopped with status {status}", one.log.read_text(errors="replace")[-8000:]]
    sys.stdout.writelines(f"FOUND {line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
