"""The activations that a gated feed-forward block may have beside silu(gate) * up, with the numbers they take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamped:
    """`clamped_mul` with its two numbers (gpt-oss)."""

    limit: float  # above 0
    steepness: float


@dataclass(frozen=True, slots=True)
class Gelu:
    """`gelu_mul` (Gemma)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """`limited_mul` with its number (Step)."""

    limit: float  # above 0


Activation = Clamped | Gelu | Limited  # None in its place stands for silu(gate) * up
