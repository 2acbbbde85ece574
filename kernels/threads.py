"""Runs a compiled task on several threads: those of the OpenMP runtime that torch has loaded already.

A separate pool would be a second set of threads beside torch's, and the two would fight for the cores.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba import types
from numba.core.ccallback import CFunc

from slipstream.kernels.compiled import SOURCES, emits, inlined, name_after_closure
from slipstream.kernels.disk_cache import cache_on_disk

# (task address, argument address, number of threads, 0): GOMP_parallel
_parallel: Any = types.ExternalFunction(
    "slipstream_parallel", types.void(types.int64, types.int64, types.uint32, types.uint32)
)


@emits(types.void)
def call(builder: ir.IRBuilder, task: Any, argument: Any) -> None:
    """Call the task at that address in this thread."""
    function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    builder.call(builder.inttoptr(task, function_type.as_pointer()), [argument])


@inlined
def run(task: int, argument: int, n_threads: int) -> None:
    """Each of n_threads threads calls task(argument)."""
    if n_threads > 1:
        _parallel(task, argument, n_threads, 0)
    else:
        call(task, argument)


_KEPT: list[CFunc] = []  # compiled tasks live as long as the process: their addresses are handed out


def compile_task(body: Callable[[int], None]) -> int:
    """Compile a task, a function of one address; returns the address of its code."""
    runtime()  # code that starts tasks refers to the symbol it adds
    name_after_closure(body)
    signature = types.void(types.int64)
    task: Any = CFunc(
        body, (signature.args, signature.return_type), {}, {"nopython": True, "error_model": "numpy"}
    )
    cache_on_disk(task, SOURCES)
    task.compile()
    _KEPT.append(task)
    address: int = task.address
    return address


@functools.cache
def runtime() -> bool:
    """True if torch's OpenMP runtime was found; without it `available` is 1. Adds the symbol that `_parallel` calls."""
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        function = None
    # Kernels refer to the symbol, so it must exist even without the runtime; with one thread they do not call it.
    resolved = function or ctypes.CDLL(None).abort
    llvmlite.binding.add_symbol("slipstream_parallel", ctypes.cast(resolved, ctypes.c_void_p).value)
    return function is not None


def available() -> int:
    """Threads a kernel may use: torch's number."""
    return torch.get_num_threads() if runtime() else 1
