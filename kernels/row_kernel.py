"""Kernels that do each row by itself, whose rows several threads share where there are many, as in a prompt.

A kernel's last argument is (first row, end). Threads take some rows at a time and call the kernel's native entry with
these in place of all (`program.py`), so a kernel is compiled once, for one thread and for several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from slipstream.kernels import threads
from slipstream.kernels.compiled import fetch_add, kernel, long_kernel, long_pointer, shifted
from slipstream.kernels.kernel import Kernel, recorder
from slipstream.kernels.program import enter, entry_of

MANY = 64  # rows; fewer are done before another thread has woken, and may be recorded
AT_ONCE = 16  # rows that a thread takes
ADAPTER, ENTRY, ARGUMENTS, N_ARGUMENTS, NEXT, END, N_FAILED, N_WORDS = range(8)


class RowKernel(Kernel):
    """A kernel whose last argument is (first row, end)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, kernel(function).dispatcher)

    def __call__(self, *args: Any) -> Any:
        """Raises RuntimeError if a call in a thread fails."""
        first, end = args[-1]
        n_threads = min(threads.available(), (end - first) // AT_ONCE)
        if end - first < MANY or n_threads < 2 or recorder() is not None:
            return super().__call__(*args)
        words: list[int] = []
        entry = entry_of(self, args, words)
        given = np.array(words, np.uint64)
        if not _share(*entry, (given.ctypes.data, len(given)), (first, end), _task(), n_threads):
            raise RuntimeError(f"a thread's call of {self.__qualname__} failed")
        return None


@long_kernel
def _share(adapter: int, entry: int, arguments: Any, rows: Any, task: int, n_threads: int) -> bool:
    """Whether all calls returned. arguments: (address of their words, how many); rows: (first, end)."""
    memory = np.zeros(N_WORDS, np.int64)
    memory[ADAPTER], memory[ENTRY], memory[ARGUMENTS:NEXT] = adapter, entry, arguments
    memory[NEXT:N_FAILED] = rows
    threads.run(task, memory.ctypes.data, n_threads)
    return memory[N_FAILED] == 0


def _take_rows(address: int) -> None:
    """Call the kernel for some rows until none is left."""
    a = long_pointer(address)
    n, given = a[N_ARGUMENTS], long_pointer(a[ARGUMENTS])
    own = np.empty(n, np.int64)
    for i in range(n):
        own[i] = given[i]
    first = fetch_add(shifted(a, NEXT), AT_ONCE)
    while first < a[END]:
        own[n - 2], own[n - 1] = first, min(first + AT_ONCE, a[END])
        if enter(a[ADAPTER], a[ENTRY], own.ctypes.data) != 0:
            fetch_add(shifted(a, N_FAILED), 1)
        first = fetch_add(shifted(a, NEXT), AT_ONCE)
    own[0] = 0  # keeps the memory alive until here


@functools.cache
def _task() -> int:
    """Address of the compiled task."""
    return threads.compile_task(_take_rows)
