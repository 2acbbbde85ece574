"""What a user may say of a draft head that its files do not say, or on which published programs differ.

Only acceptance depends on any of it. Near zero, it is the sign that a choice is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadChoices:
    """For all kinds of heads; each reads those that are its own."""

    # Hidden states to read, in our numbers; None: those that the files name.
    taps: Sequence[int] | None = None
    # What an MTP module hands on: its state "normed" or "raw"; auto: as its family does.
    recycled: str = "auto"
    position: str = "newest"  # by which an assistant's queries turn: the newest token's, or the one "before"


NO_CHOICE = HeadChoices()
