"""The faults that `make mutants` plants: `faults/ROOM.toml`, a table per fault.

[name-of-the-fault]
file = "engine/speculate/acceptance.py"   # from the repository's root
old = "n_accepted < len(drafts)"          # stands there once
new = "n_accepted <= len(drafts)"
why = "what would go wrong, and how one comes to write it"
tests = ["tests/unit/test_acceptance.py"] # files or file::function, of which one at least has to fail
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A text that is replaced in a file, and the tests that are to find it."""

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def planted(self, root: Path = ROOT) -> str:
        """The file's text with the fault. Raises ValueError unless the replaced text stands in it exactly once."""
        source = (root / self.file).read_text(encoding="utf-8")
        n = source.count(self.old)
        if n != 1:
            raise ValueError(f"{self.name}: the text to replace stands {n} times in {self.file}")
        return source.replace(self.old, self.new)


def faults(folder: Path = FAULTS) -> Iterator[Fault]:
    """All faults, room by room. Raises TypeError for a missing or an unknown key."""
    for path in sorted(folder.glob("*.toml")):
        for name, one in tomllib.loads(path.read_text(encoding="utf-8")).items():
            yield Fault(name=name, **{**one, "tests": tuple(one["tests"])})
