"""Unmodified clients through the ingress: `python -m tests.ray.clients`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.clients.__main__ import SETTINGS, passes, prepare
from tests.process import FAKE, running
from tests.ray.cluster import started

CLIENTS = ("openai", "langchain")


def main() -> int:
    for name in CLIENTS:
        prepare(name)
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), settings=SETTINGS) as cluster,
        running(Path(folder) / "thinking.log", ("-m", "THINKING"), FAKE) as thinking,
    ):
        failed = [name for name in CLIENTS if not passes(name, cluster.server, thinking)]
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
