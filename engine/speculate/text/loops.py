"""Loops over tokens, compiled by numba; where numba is not installed they run as plain Python.

So every drafter runs without numba too: the same guesses, some hundred times slower. That is still below a millisecond
a step for one slot, and a warning reports it once at start.

They assign numbers, not slices to slices: for the error of shapes that differ numba compiles, in three seconds, all
that formats integers and joins strings.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

try:
    from numba import njit
except ImportError:
    njit = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)

if njit is None:
    log.warning("numba is not installed: drafters that read text run as plain Python, slowly")


def compiled(function: F, **options: Any) -> F:
    """The function compiled at its first call, cached on disk; the function itself without numba.

    options: further options of `numba.njit`. Hashes wrap around in both cases.
    """
    if njit is not None:
        from slipstream.kernels.disk_cache import cache_on_disk

        kept = njit(nogil=True, **options)(function)
        cache_on_disk(kept, _sources())
        return cast(F, kept)

    @functools.wraps(function)
    def interpreted(*args: Any) -> Any:
        with np.errstate(over="ignore"):
            return function(*args)

    interpreted.py_func = function  # as numba's functions have it
    return cast(F, interpreted)


@functools.cache
def _sources() -> str:
    """Digest of all that is compiled here, since functions have copies of others, also from other files."""
    from slipstream.kernels.disk_cache import digest

    return digest(
        path for name in ("ngram", "text") for path in (Path(__file__).parents[1] / name).glob("*.py")
    )
