"""What every part of `make gpu` is given, and what it gives back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream import kernels
from slipstream.kernels.dispatch import CannotRunError, Selected

Figures = dict[str, Any]  # column -> number or text


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    ok: bool | None = None  # None: a figure, which proves nothing
    figures: Figures = field(default_factory=dict)


Findings = Iterator[Finding]


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


def selected(device: torch.device, dtype: torch.dtype) -> tuple[list[Selected], list[str]]:
    """`kernels.select`, with the reference where an implementation cannot be prepared: (the table, what could not)."""
    asked: dict[str, str] = {}
    problems: list[str] = []
    while True:
        try:
            return kernels.select(device, dtype, asked), problems
        except CannotRunError as error:
            named = [folder for folder in kernels.OPS if folder not in asked and _names(str(error), folder)]
            if not named:
                raise
            problems.append(str(error))
            asked[named[0]] = "reference"


def _names(message: str, folder: str) -> bool:
    """Whether a message is about an op: it begins with its folder, or names its module or a source in it."""
    return (
        message.startswith((f"{folder}:", f"{folder}."))
        or f"kernels.{folder}." in message
        or f"{folder}/" in message
    )


def spoils(error: Exception) -> bool:
    """Whether nothing runs any more in this process' CUDA context."""
    return "CUDA error" in str(error) or type(error).__name__ in ("AcceleratorError", "CUDAError")
