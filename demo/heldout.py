"""The fixed held-out tasks in tasks.jsonl, for tests and benchmarks on any Python version.

Run as `python -m demo.heldout` to write the file anew.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from demo import tasks

FILE = Path(__file__).parent / "tasks.jsonl"
Length = Literal["short", "long"]
SEED = 11
COUNT = 40
SHORT_LINES = 12
LONG_LINES = 40


@dataclass(frozen=True)
class HeldoutTask:
    """A task of the file; long ones show more than twelve lines."""

    id: str
    task: tasks.Task
    length: Length


def load(kind: tasks.Kind | None = None, length: Length | None = None) -> list[HeldoutTask]:
    """The tasks of the file, all or those of a kind and length, in the order of the file."""
    found = []
    for line in FILE.read_text().splitlines():
        row = json.loads(line)
        if kind in (None, row["kind"]) and length in (None, row["length"]):
            task = tasks.Task(row["kind"], row["messages"], row["reference"])
            found.append(HeldoutTask(row["id"], task, row["length"]))
    return found


def draw() -> list[HeldoutTask]:
    """Forty short tasks of each kind and twenty long renames."""
    rng = random.Random(SEED)
    pool = [f for f in tasks.functions("heldout") if 4 <= f.line_count <= LONG_LINES]
    short = [f for f in pool if f.line_count <= SHORT_LINES]
    long = [f for f in pool if f.line_count > SHORT_LINES and f.renamable]
    renames = rng.sample([f for f in short if f.renamable], COUNT)
    continued = rng.sample([f for f in pool if f.line_count <= 2 * SHORT_LINES], COUNT)
    documented = rng.sample([f for f in pool if f.docstring and f.line_count <= 2 * SHORT_LINES], COUNT)
    return [
        *_number("rename", "short", [tasks.rename_task(f, rng) for f in renames]),
        *_number("rename", "long", [tasks.rename_task(f, rng) for f in rng.sample(long, COUNT // 2)]),
        *_number("continue", "short", [tasks.continue_task(f, rng) for f in continued]),
        *_number("docstring", "short", [tasks.docstring_task(f) for f in documented]),
    ]


def _number(kind: tasks.Kind, length: Length, drawn: list[tasks.Task]) -> list[HeldoutTask]:
    return [HeldoutTask(f"{kind}-{length}-{index:02d}", task, length) for index, task in enumerate(drawn)]


def main() -> None:
    """Write the file."""
    rows = (
        {
            "id": held.id,
            "kind": held.task.kind,
            "length": held.length,
            "messages": held.task.prompt_messages,
            "reference": held.task.reference,
        }
        for held in draw()
    )
    FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
