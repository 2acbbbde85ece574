"""What stands between the two linear layers of a gated feed-forward block, as data."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Activation(NamedTuple):
    """A form of `gated_mul`, with the numbers that it takes."""

    form: Literal["silu", "gelu", "clamped", "limited"] = "silu"
    limit: float = 0.0  # of clamped and limited: above 0
    steepness: float = 0.0  # of clamped


SILU, GELU = Activation(), Activation("gelu")
