"""What Python calls of compiled code, and how those calls are seen by whatever writes them down.

A thread that records (`tape.py`) registers its recorder here: kernels and operators ask whether their thread has one.
Nothing else of a recording concerns them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol


class Recorder(Protocol):
    """What writes down the operations of a thread."""

    def kernel(self, kernel: Kernel, args: tuple[Any, ...]) -> Any:
        """Call the kernel, and be able to call it again."""

    def operator(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same of an operator's implementation."""


_recorders: dict[int, Recorder] = {}  # by thread


def recorder() -> Recorder | None:
    """What records the calling thread's operations, if anything does."""
    return _recorders.get(get_ident()) if _recorders else None


def begin_recording(recorder: Recorder) -> None:
    """Operations of the calling thread go to the recorder from now on."""
    _recorders[get_ident()] = recorder


def end_recording() -> None:
    """They no longer do."""
    _recorders.pop(get_ident(), None)


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator's implementation; where the calling thread is recorded, through the recorder."""
    found = recorder()
    return function(*args, **kwargs) if found is None else found.operator(function, args, kwargs)


class Kernel:
    """A function that numba compiles for the types it is called with."""

    def __init__(self, function: Callable[..., Any], dispatcher: Any) -> None:
        functools.update_wrapper(self, function)
        self.dispatcher = dispatcher
        self.entries: dict[str, tuple[int, int]] = {}  # of `program.py`: by kinds of arguments
        self._numba_type_ = dispatcher._numba_type_  # what compiled code that calls it sees

    def __call__(self, *args: Any) -> Any:
        found = recorder()
        return self.dispatcher(*args) if found is None else found.kernel(self, args)
