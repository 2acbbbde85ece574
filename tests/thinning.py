"""Which cases `make test` leaves out: of tests marked `sampled`, all but a few cases of each function.

A sample is enough only while nothing has changed that the cases are about. So `make check-all`, which runs every case,
writes down digests of the sources of each group, and wherever the sources differ from that record, `make test` runs
every case too. The record is committed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("full_record.json")
# What the cases of a group are about, as patterns of files.
GROUPS: Mapping[str, Sequence[str]] = {
    "cuda": ("kernels/**/*.cu", "kernels/**/*.cuh", "kernels/**/cuda.py", "tests/emulator/**/*"),
    "triton": ("kernels/**/triton*.py", "kernels/**/reference.py", "kernels/chunk.py"),
    "engine": (
        *("engine/core/*.py", "engine/cache/*.py", "engine/sample/*.py", "engine/slot.py", "engine/batch.py"),
        *("engine/speculate/**/*.py", "engine/models/**/*.py", "engine/layers/*.py", "tests/oracle/l*.py"),
    ),
    "planner": ("engine/speculate/decide/*.py", "engine/speculate/chain.py", "tests/simulate/**/*"),
    "bench": ("tests/bench/*.py", "engine/core/engine.py", "engine/service/start/*.py"),
    "disk cache": ("kernels/disk_cache.py",),
    "kernels": ("kernels/**/*.py", "engine/layers/*.py"),
    "gpu runs": ("tests/gpu/*.py", "kernels/dispatch.py", "kernels/*/op.py"),
    "formats": ("server/openai/formats/*.py",),
    "process": ("server/command/*.py", "server/http/*.py", "engine/service/**/*.py"),
}
SKIPPED = ("__pycache__", ".pyc")


def sources(group: str) -> Iterator[Path]:
    """The files of a group, each once, in order."""
    found = {path for pattern in GROUPS[group] for path in ROOT.glob(pattern) if path.is_file()}
    yield from sorted(path for path in found if not any(part in str(path) for part in SKIPPED))


def digest(group: str) -> str:
    made = hashlib.sha256()
    for path in sources(group):
        made.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return made.hexdigest()


def recorded() -> dict[str, str]:
    found: dict[str, str] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def changed() -> frozenset[str]:
    """Groups whose sources differ from those that every case was last run on."""
    known = recorded()
    return frozenset(group for group in GROUPS if known.get(group) != digest(group))


def thinned(
    items: Sequence[pytest.Item], whole: Collection[str]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run and those left out. whole: groups of which every case is to run.

    Of each function's cases those stay that are spread evenly from the first to the last.
    """
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    left: set[pytest.Item] = set()
    for of_function in cases.values():
        mark = of_function[0].get_closest_marker("sampled")
        if mark is not None and mark.args[0] not in whole:
            n, keep = len(of_function), mark.kwargs.get("keep", 2)
            kept = {round(i * (n - 1) / max(1, keep - 1)) for i in range(min(keep, n))}
            left |= {item for i, item in enumerate(of_function) if i not in kept}
    return [one for one in items if one not in left], [one for one in items if one in left]


if __name__ == "__main__":
    RECORD.write_text(json.dumps({group: digest(group) for group in GROUPS}, indent=2) + "\n")
    sys.stdout.write(f"{RECORD.relative_to(ROOT)}: every case has run on these sources\n")
