"""Schemathesis over the server's own OpenAPI document: every check it has, against every operation.

python -m tests.fuzz.schema URL [--examples 40] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CONFIG = Path(__file__).with_name("schemathesis.toml")
ANSWER_S = 60  # an answer that takes longer counts as a hang
FEWEST = 2000  # cases; fewer would mean that most operations were not tried


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--examples", type=int, default=40, help="random cases per operation and direction")
    parser.add_argument("--key", default="none")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(
                str(Path(sys.executable).with_name("schemathesis")),
                "--config-file",
                str(CONFIG),
                "--no-color",
            ),
            *(
                "run",
                f"{options.url}/openapi.json",
                "--phases",
                "examples,coverage,fuzzing",
            ),
            *(
                "--max-examples",
                str(options.examples),
                "--request-timeout",
                str(ANSWER_S),
                "--continue-on-failure",
            ),
            *("--header", f"Authorization: Bearer {options.key}"),
            *("--report", "json", "--report-json-path", str(report), "--output-sanitize", "false"),
        ]
        if options.seed is not None:
            command += ["--seed", str(options.seed)]
        done = subprocess.run(command, check=False, cwd=folder)
        told = json.loads(report.read_text())
    n_cases = told["test_cases"]["generated"]
    if n_cases < FEWEST or not told["complete"]:
        sys.stdout.write(f"FOUND only {n_cases} cases of at least {FEWEST}\n")
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
