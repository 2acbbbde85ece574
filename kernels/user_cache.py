"""Folders below the user's cache: compiled kernels, and what they have proven."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)
# What this process could not keep for later ones -> a sentence about the first of it.
unkept: dict[str, str] = {}


def folder(name: str) -> Path | None:
    """$XDG_CACHE_HOME/slipstream/NAME, or below ~/.cache where that is not set; None for a user without a home."""
    # Where caches lie is a matter between the user and the system, like the home folder; it is no setting of ours.
    caches = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251
    try:
        return (Path(caches) if caches else Path("~/.cache").expanduser()) / "slipstream" / name
    except RuntimeError:
        return None


def keep(path: Path, content: bytes, what: str) -> None:
    """Write a file for later processes. It appears whole or not at all; a folder that refuses is only noted.

    what: of what it keeps, as `cannot_keep` names it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as beside:
            whole = Path(beside) / path.name
            whole.write_bytes(content)
            whole.replace(path)
    except OSError as error:
        cannot_keep(what, f"in {path.parent} ({error.strerror})")


def cannot_keep(what: str, why: str) -> None:
    """Note it. Only the first is logged: on a full disk each of many kernels would be."""
    sentence = f"{what} cannot be kept {why}"
    if not unkept:
        log.warning("%s; each process makes anew what it needs", sentence)
    unkept.setdefault(what, sentence)
