"""How a setting is declared: its default, its meaning, its flags and bounds beside it."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from slipstream.engine.ranges import SAMPLING_RANGES


def setting(
    default: Any,
    meaning: str,
    *flags: str,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field whose first long flag is its name; further `flags` are aliases (llama.cpp's names)."""
    return field(
        default=default,
        metadata={"meaning": meaning, "flags": flags, "least": least, "most": most, "choices": choices},
    )


def sampled(name: str, meaning: str, *flags: str) -> Any:
    """A setting that is the default of a request's field of this name."""
    least, most = SAMPLING_RANGES[name]
    return setting(None, meaning, *flags, least=least, most=most)
