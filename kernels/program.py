"""Calls of compiled kernels, written down and made again by one call of compiled code.

Between two kernels of a pass Python prepares the next, and the weights that the last one read have pushed Python's data
out of the caches: a call that takes 11 µs in a loop takes 38 there, hundreds of times a pass. A program is a list of
(code, arguments) that one loop of compiled code walks, with the interpreter's lock released.

numba's compiled functions have a native entry: int32 (result *, error **, arguments...), where a tuple is as many
arguments as it has elements. An adapter, one for each list of argument types, loads them from words of 64 bits.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numpy.typing import NDArray

from slipstream.kernels.compiled import emits, long_kernel, long_pointer
from slipstream.kernels.kernel import Kernel

_MASK = (1 << 64) - 1
# What numba hands on for an int, a float, a bool and None.
_LLVM = {"i": "i64", "f": "double", "b": "i8", "n": "i8*"}
_WORD, _STATUS, _BYTES = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()


class CannotReplay(RuntimeError):
    """Something that a program cannot do again."""


class Program:
    """Calls of kernels in their order; `seal` ends the writing."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, int]] = []  # adapter, entry, place of its arguments in `_words`
        self._words: list[int] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        """The kernel has just been called so. Raises `CannotReplay` for a call that a program cannot make."""
        place = len(self._words)
        self._calls.append((*entry_of(kernel, args, self._words), place))

    def seal(self) -> Sealed:
        """What makes all calls again."""
        words = np.array(self._words, np.uint64)
        calls = np.array(self._calls, np.int64)  # [n_calls, 3]
        calls[:, 2] = words.ctypes.data + calls[:, 2] * words.itemsize
        return Sealed(calls, words)


class Sealed:
    """A program that is written."""

    def __init__(self, calls: NDArray[np.int64], words: NDArray[np.uint64]) -> None:
        """calls: [n_calls, 3]: adapter, entry, address of arguments, which are in `words`."""
        self._calls, self._words = calls, words
        self._address, self._n_calls = calls.ctypes.data, len(calls)

    def __call__(self) -> None:
        """Make all calls. Raises RuntimeError if one of them fails; those behind it are not made then."""
        n_made = _make(self._address, self._n_calls)
        if n_made < self._n_calls:
            raise RuntimeError(f"call {n_made} of {self._n_calls} of a recorded pass failed")


@emits(types.int32)
def enter(builder: ir.IRBuilder, adapter: Any, entry: Any, words: Any) -> Any:
    """Status of the call; 0: it returned."""
    kind = ir.FunctionType(_STATUS, [_WORD, _WORD])
    return builder.call(builder.inttoptr(adapter, kind.as_pointer()), [entry, words])


@long_kernel
def _make(calls: int, n: int) -> int:
    """Calls made before one failed, or all."""
    a = long_pointer(calls)
    for i in range(n):
        if enter(a[3 * i], a[3 * i + 1], a[3 * i + 2]) != 0:
            return i
    return n


def entry_of(kernel: Kernel, args: tuple[Any, ...], words: list[int]) -> tuple[int, int]:
    """Addresses of the adapter and of the native entry for such arguments, whose words are appended.

    Raises `CannotReplay` as `Program.add` does.
    """
    kinds, known = _flatten(args, words), kernel.entries
    if kinds not in known:
        known[kinds] = _entry(kernel, args, kinds)
    return known[kinds]


def _flatten(values: tuple[Any, ...], words: list[int]) -> str:
    """Append the values to the words, those of tuples too; returns what they are, a letter each, and brackets."""
    kinds = ""
    for value in values:
        kind = type(value)
        if kind is int:
            words.append(value & _MASK)
            kinds += "i"
        elif kind is tuple:
            kinds += f"({_flatten(value, words)})"
        elif kind is float:
            words.append(int.from_bytes(struct.pack("<d", value), "little"))
            kinds += "f"
        elif kind is bool or value is None:
            words.append(int(value or 0))
            kinds += "n" if value is None else "b"
        else:
            raise CannotReplay(f"an argument is a {kind.__name__}")
    return kinds


def _entry(kernel: Kernel, args: tuple[Any, ...], kinds: str) -> tuple[int, int]:
    """Addresses of the adapter and of the native entry for such arguments."""
    dispatcher = kernel.dispatcher
    given = tuple(map(dispatcher.typeof_pyval, args))
    dispatcher.compile(given)  # unless it is
    compiled = dispatcher.overloads[given]
    if compiled.signature.return_type is not types.none:
        raise CannotReplay(f"{kernel.__qualname__} returns a value")
    found = cpu_target.target_context.get_arg_packer(compiled.signature.args).argument_types
    expected = [_LLVM[kind] for kind in kinds if kind in _LLVM]
    if [str(one) for one in found] != expected:
        raise CannotReplay(f"{kernel.__qualname__} takes {', '.join(map(str, found))} for {kinds}")
    return _adapter(tuple(expected)), compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


_LIBRARIES: list[Any] = []  # compiled adapters live as long as the process


@functools.cache
@global_compiler_lock
def _adapter(kinds: Sequence[str]) -> int:
    """Address of compiled (entry, address of words) -> status, for arguments of these LLVM types."""
    library = cpu_target.target_context.codegen().create_library(f"slipstream.adapter{len(_LIBRARIES)}")
    module = library.create_ir_module(library.name)
    function = ir.Function(module, ir.FunctionType(_STATUS, [_WORD, _WORD]), library.name)
    builder = ir.IRBuilder(function.append_basic_block())
    entry, place = function.args
    words = builder.inttoptr(place, _WORD.as_pointer())
    values = [_loaded(builder, kind, builder.gep(words, [_WORD(i)])) for i, kind in enumerate(kinds)]
    results = [builder.alloca(_BYTES), builder.alloca(_BYTES)]  # a value, of which there is none; an error
    arguments = [*results, *values]
    called = ir.FunctionType(_STATUS, [one.type for one in arguments])
    builder.ret(builder.call(builder.inttoptr(entry, called.as_pointer()), arguments))
    library.add_ir_module(module)
    library.finalize()
    _LIBRARIES.append(library)
    address: int = library.get_pointer_to_function(library.name)
    return address


def _loaded(builder: ir.IRBuilder, kind: str, place: Any) -> Any:
    """The word at that place as an argument of an LLVM type, one of `_LLVM`."""
    word = builder.load(place)
    if kind == "double":
        return builder.bitcast(word, ir.DoubleType())
    if kind == "i8*":
        return builder.inttoptr(word, _BYTES)
    return word if kind == "i64" else builder.trunc(word, ir.IntType(8))
