"""What every part of `make gpu` is given, and what it gives back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Figures = dict[str, Any]  # column -> number or text
BAR = "BAR "  # how the name of a goal's finding begins
NOT_MEASURED = "not measured: "  # how the reason begins where there was no time or no tool


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    ok: bool | None = None  # None: a figure, which proves nothing
    figures: Figures = field(default_factory=dict)


Findings = Iterator[Finding]


def bar(name: str, value: float, meant: str, *, met: bool) -> Finding:
    """A goal that was set and whether it is met; a missed one fails nothing."""
    return Finding(f"{BAR}{name}", None, {"value": value, "goal": meant, "met": "yes" if met else "NO"})


def not_measured(name: str, why: str) -> Finding:
    """What there was no time or no tool for, which is no failure."""
    return Finding(name, None, {"why": f"{NOT_MEASURED}{why}"})


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a part runs and how long it may take."""

    device: torch.device
    quick: bool  # tiny sizes, few draws: whether everything runs, not what it is worth
    deadline: float  # of the part, on time.monotonic's clock

    def left_s(self) -> float:
        """Seconds that the part still has."""
        return self.deadline - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: Any, quick: Any) -> Any:
        """One of two sizes."""
        return quick if self.quick else full
