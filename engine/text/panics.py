"""Panics of libraries written in Rust, as exceptions that are handled like any other fault of one request.

pyo3 raises a panic as a `BaseException`, so that it passes by every `except Exception`: a request would go without an
answer, and the engine's thread would end with all requests. Whatever calls such a library on texts or tokens of a
request is therefore `without_panics`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Every library has a class of its own for panics, which cannot be imported; they share the name of their module.
_MODULE = "pyo3_runtime"


class LibraryPanicked(RuntimeError):
    """A library has met a fault of its own. Its words, which may quote a text, it has written to standard error."""


def without_panics(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, raising `LibraryPanicked` where it panics."""

    @functools.wraps(call)
    def calling(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if type(error).__module__ != _MODULE:
                raise
            panicked = LibraryPanicked(f"{call.__qualname__}: a library panicked")
        raise panicked  # outside the handler, as the panic's own words may quote a text

    return calling
