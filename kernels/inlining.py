"""Functions of kernels that are only ever part of their callers: numba makes no machine code of them alone.

To numba a function that others copy is a function like any other: it adds entries for Python and for C, with a copy of
the function each, optimises the three as a whole and emits machine code of them, at every level of nesting again. Here
its code is kept for its callers; the kernel at the top alone, with all of its parts, is optimised and emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

F = TypeVar("F", bound=Callable[..., Any])


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """A function's code, with that of the functions it calls."""

    # numba gives every function's code its constants for the interpreter, at an address that this code does not have.
    codegen = SimpleNamespace(set_env=lambda *_: None)

    def _optimize_final_module(self) -> None:
        """Left to the kernel, which comes out the same: what is copied there is optimised there anyway."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """0, as of a function that is not there. It ends what numba would add to."""
        self._ensure_finalized()
        return 0


class _Lowering(Compiler):  # type: ignore[misc]
    """numba's compiler, with a `_Part` for the code."""

    def __init__(self, typing: Any, target: Any, library: None, *rest: Any) -> None:
        part = _Part(target.codegen(), "part")
        part.enable_object_caching()
        super().__init__(typing, target, part, *rest)


def inlined(function: F) -> F:
    """A function of kernels, copied into each caller. Python cannot call it."""
    compiled: F = numba.njit(
        function,
        pipeline_class=_Lowering,
        error_model="numpy",
        forceinline=True,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )
    return compiled
