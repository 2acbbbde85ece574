"""Loops over tokens, compiled by numba; where numba is not installed they run as the Python they are.

A machine with a GPU and little else can then run every drafter: the same guesses, some hundred times slower. That is
still below a millisecond a step for one slot, and it is said once at start.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import numba
except ImportError:
    numba = None

log = logging.getLogger(__name__)

if numba is None:
    log.warning(
        "event=uncompiled numba is not installed: drafters that read text run as plain Python, slowly"
    )


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """The function compiled at its first call, cached beside its source; the function itself without numba.

    options: further ones of `numba.njit`. Hashes wrap around in both cases.
    """
    if numba is not None:
        return numba.njit(cache=True, nogil=True, **options)(function)

    @functools.wraps(function)
    def interpreted(*args: Any) -> Any:
        with np.errstate(over="ignore"):
            return function(*args)

    interpreted.py_func = function  # type: ignore[attr-defined]  # where numba has it
    return interpreted
