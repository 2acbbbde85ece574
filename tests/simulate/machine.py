"""A machine: what passes and drafters cost, in seconds, and what disturbs it. Read from a TOML file (README.md)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulate.clock import Trouble, interpolated

FOLDER = Path(__file__).parent / "machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of a target pass."""

    points: Sequence[Sequence[float]]  # [rows, seconds]; lines between them
    context_s: float = 0.0  # per token of context that the slots of the pass read
    prompt_row_s: float = 0.0  # per row of a prompt, beyond what a row costs
    experts_s: float = 0.0  # reading all experts of all layers
    experts_share: float = 0.0  # of the experts, that a row uses


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTimes:
    """Seconds of a text drafter."""

    ask_s: float = 30e-6  # per slot that is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTimes:
    """Seconds of a draft network."""

    position_s: float  # per position of a draft, all slots together
    call_s: float = 0.0  # per call
    slot_s: float = 0.0  # per slot and position
    row_s: float = 0.0  # per token of the text that it is fed
    context: int = 512  # tokens before a guess that it is fed at most


@dataclass(frozen=True, slots=True)
class Machine:
    """What is scripted of a machine."""

    name: str
    about: str
    batch_rows: int  # of a pass
    passes: PassTimes
    text: TextTimes
    network: NetworkTimes
    trouble: Trouble
    _by_rows: list[float] = field(repr=False)  # [batch_rows + 1] seconds

    @classmethod
    def of(cls, table: Mapping[str, Any], name: str) -> Machine:
        """What a machine's file says; raises `TypeError` for a key that is unknown."""
        known = {
            "about",
            "batch_rows",
            "pass",
            "text",
            "network",
            "noise",
            "spell",
            "drift",
            "suspension",
            "jump",
        }
        if extra := set(table) - known:
            raise TypeError(f"machine {name}: unknown keys {sorted(extra)}")
        passes, batch_rows = PassTimes(**table["pass"]), table.get("batch_rows", 512)
        by_rows = [
            seconds + passes.experts_s * (1.0 - (1.0 - passes.experts_share) ** n)
            for n, seconds in enumerate(interpolated(passes.points, batch_rows))
        ]
        text, network = TextTimes(**table.get("text", {})), NetworkTimes(**table["network"])
        return cls(
            name, table.get("about", ""), batch_rows, passes, text, network, Trouble.of(table), by_rows
        )

    def pass_s(self, n_rows: int, n_prompt_rows: int = 0, n_context: int = 0) -> float:
        """Seconds of an undisturbed pass. n_rows: all of it; n_context: tokens that its rows read, over all slots."""
        beside = self.passes.context_s * n_context + self.passes.prompt_row_s * n_prompt_rows
        return self._by_rows[n_rows] + beside


def read_machine(path: Path) -> Machine:
    """The machine of a file, named after it."""
    return Machine.of(tomllib.loads(path.read_text(encoding="utf-8")), path.stem)


def all_machines() -> dict[str, Path]:
    """The files of this folder's machines by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
