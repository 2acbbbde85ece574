"""Folders below the user's cache: compiled kernels, and what they have proven."""

from __future__ import annotations

import os
from pathlib import Path


def folder(name: str) -> Path | None:
    """$XDG_CACHE_HOME/slipstream/NAME, or below ~/.cache where that is not set; None for a user without a home."""
    # Where caches lie is a matter between the user and the system, like the home folder; it is no setting of ours.
    caches = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251
    try:
        return (Path(caches) if caches else Path("~/.cache").expanduser()) / "slipstream" / name
    except RuntimeError:
        return None
