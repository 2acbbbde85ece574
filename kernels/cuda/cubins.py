"""The folder compiled kernels are kept in: one file per source, architecture and compiler.

A file that was cut short or changed is compiled anew; a folder that cannot be written is done without.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import NamedTuple

from slipstream.kernels import user_cache

log = logging.getLogger(__name__)


class Compiled(NamedTuple):
    """Machine code of a source for one architecture."""

    cubin: bytes
    symbols: dict[str, str]  # instance -> mangled name
    log: str  # of the assembler


def user_folder() -> Path | None:
    """Where they are kept; None for a user without a home."""
    return user_cache.folder("cubins")


def load(folder: Path, key: str) -> Compiled | None:
    """What is kept under that key; None if there is none, or one that is damaged."""
    try:
        head, _, cubin = (folder / f"{key}.cubin").read_bytes().partition(b"\n")
        known = json.loads(head)
        symbols, said, digest = known["symbols"], known["log"], known["sha256"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("kept kernel %s cannot be read (%s); it is compiled again", key, error)
        return None
    if digest != _digest(cubin, symbols):
        log.warning("kept kernel %s is damaged; it is compiled again", key)
        return None
    return Compiled(cubin, symbols, said)


def store(folder: Path, key: str, code: Compiled) -> None:
    """Keep it for later processes, if the folder allows it."""
    cubin, symbols, said = code
    head = {"symbols": symbols, "log": said, "sha256": _digest(cubin, symbols)}
    user_cache.keep(folder / f"{key}.cubin", json.dumps(head).encode() + b"\n" + cubin, "kernels")


def _digest(cubin: bytes, symbols: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(symbols, sort_keys=True).encode() + cubin).hexdigest()
