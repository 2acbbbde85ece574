"""Reads a Dockerfile: stages of instructions, with variables filled in as docker would.

For `replay.py`, which follows them, and for tests that compare them with our code. Whether docker or good practice has
something against them is hadolint's to say, in `make check`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
WORDS = frozenset(
    {
        *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
        *("RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    }
)


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: `RUN pip install .` is the word RUN and the rest."""

    line: int
    word: str
    rest: str

    @property
    def flags(self) -> dict[str, str]:
        """`--from=build` as {"from": "build"}."""
        found = re.match(r"((?:--\S+\s+)*)", self.rest)
        flags = found.group(1).split() if found else []
        return {name: value for name, _, value in (one[2:].partition("=") for one in flags)}

    @property
    def arguments(self) -> list[str]:
        """Words without flags; those of an exec form if it is one."""
        rest = re.sub(r"^(?:--\S+\s+)*", "", self.rest)
        return [str(one) for one in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)

    @property
    def pairs(self) -> dict[str, str]:
        """`A=1 B=2` of ENV, LABEL and ARG."""
        return {name: value for name, _, value in (one.partition("=") for one in shlex.split(self.rest))}


@dataclass(slots=True)
class Stage:
    """What stands between two FROM lines."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def all(self, word: str) -> list[Step]:
        return [step for step in self.steps if step.word == word]

    def last(self, word: str) -> Step:
        """The one that counts, of instructions where a later one replaces the earlier."""
        return self.all(word)[-1]


def read(path: Path) -> list[Stage]:
    """The stages in order. Raises ValueError for a word that `replay.py` would not know what to do with."""
    stages: list[Stage] = []
    given: dict[str, str] = {}
    for step in _steps(path.read_text(encoding="utf-8")):
        if step.word not in WORDS:
            raise ValueError(f"{path}:{step.line}: {step.word}")
        if step.word == "FROM":
            base, *name = re.split(r"\s+AS\s+", filled(step.rest, given), flags=re.IGNORECASE)
            stages.append(Stage(base, name[0] if name else ""))
        elif not stages:
            given |= step.pairs  # an ARG before the first FROM serves FROM lines alone
        else:
            stages[-1].steps.append(step)
    return stages


def _steps(text: str) -> list[Step]:
    found: list[Step] = []
    waiting, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        start = start if waiting else number
        waiting += line.strip()
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        word, _, rest = waiting.partition(" ")
        found.append(Step(start, word, rest.strip()))
        waiting = ""
    return found


def filled(text: str, values: Mapping[str, str]) -> str:
    """`text` with $NAME, ${NAME} and ${NAME:-default} filled in; a name without a value is empty."""
    return VARIABLE.sub(lambda one: values.get(one[1] or one[2], "") or one[3] or "", text)
