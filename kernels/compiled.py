"""How the CPU kernels are compiled: numba decorators, cached on disk, that take tensors as addresses.

A tensor argument is `tensor.data_ptr()`: unwrapping an array costs 1 µs each, an integer 0.03. No kernel uses
fast-math flags, so what is written is what is computed, in that order; speed comes from `vector.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

POINTER_TO: Any = types.CPointer
F = TypeVar("F", bound=Callable[..., Any])


def _sources() -> str:
    """Digest of the package's sources. numba's own stamp sees only the file a kernel is in, not what it calls."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES = _sources()


def kernel(function: F) -> F:
    """Compile on first call for the types it is called with; keep the GIL (for kernels of microseconds)."""
    return _compile(function, nogil=False)


def long_kernel(function: F) -> F:
    """Like `kernel`, but lets other Python threads run meanwhile."""
    return _compile(function, nogil=True)


def inlined(function: F) -> F:
    """A function of kernels, copied into each caller."""
    compiled: F = numba.njit(function, error_model="numpy", forceinline=True)
    return compiled


def routine(function: F) -> F:
    """A function of kernels that is called rather than copied; the compiler may still decide to copy it."""
    compiled: F = numba.njit(function, error_model="numpy")
    return compiled


def _compile(function: F, *, nogil: bool) -> F:
    dispatcher: Any = numba.njit(function, error_model="numpy", nogil=nogil)
    cache_on_disk(dispatcher)
    compiled: F = dispatcher
    return compiled


def cache_on_disk(function: Any) -> None:
    """Keep the machine code of a numba function beside its source, valid until any source of the package changes."""
    try:
        function.enable_caching()
    except RuntimeError:
        return  # no folder to write to: compiled anew in each process
    function._cache._cache_file._source_stamp = SOURCES


def emits(result: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a function (builder, *values) -> value that emits LLVM instructions into the calling kernel.

    result: (*numba types of the arguments) -> numba type of the result.
    """

    def wrap(emit: Callable[..., Any]) -> Callable[..., Any]:
        def lower(*arguments: Any) -> Any:
            def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                return emit(builder, *values)

            return result(*arguments)(*arguments), generate

        arities: dict[int, Callable[..., Any]] = {  # numba reads the number of arguments off the signature
            1: lambda typing, a: lower(a),
            2: lambda typing, a, b: lower(a, b),
            3: lambda typing, a, b, c: lower(a, b, c),
            4: lambda typing, a, b, c, d: lower(a, b, c, d),
        }
        wrapped: Callable[..., Any] = intrinsic(arities[emit.__code__.co_argcount - 1])
        return wrapped

    return wrap


@emits(lambda address: POINTER_TO(types.float32))
def float_pointer(builder: ir.IRBuilder, address: Any) -> Any:
    """Address -> pointer to float32."""
    return builder.inttoptr(address, ir.FloatType().as_pointer())


@emits(lambda address: POINTER_TO(types.uint16))
def bfloat_pointer(builder: ir.IRBuilder, address: Any) -> Any:
    """Address -> pointer to bfloat16, seen as its 16 bits."""
    return builder.inttoptr(address, ir.IntType(16).as_pointer())


@emits(lambda address: POINTER_TO(types.uint8))
def fp8_pointer(builder: ir.IRBuilder, address: Any) -> Any:
    """Address -> pointer to float8_e4m3fn, seen as its 8 bits."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@emits(lambda address: POINTER_TO(types.int32))
def int_pointer(builder: ir.IRBuilder, address: Any) -> Any:
    """Address -> pointer to int32."""
    return builder.inttoptr(address, ir.IntType(32).as_pointer())


@emits(lambda address: POINTER_TO(types.int64))
def long_pointer(builder: ir.IRBuilder, address: Any) -> Any:
    """Address -> pointer to int64."""
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@emits(lambda pointer, index: pointer)
def shifted(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """The pointer, `index` elements further."""
    return builder.gep(pointer, [index])


@emits(lambda address, like: like)
def pointer_like(builder: ir.IRBuilder, address: Any, like: Any) -> Any:
    """Address -> pointer of the same kind as `like`."""
    return builder.inttoptr(address, like.type)


@emits(lambda pointer: types.int64)
def address_of(builder: ir.IRBuilder, pointer: Any) -> Any:
    """Pointer -> address."""
    return builder.ptrtoint(pointer, ir.IntType(64))


@emits(lambda pointer, index: types.int64)
def fetch_add(builder: ir.IRBuilder, pointer: Any, amount: Any) -> Any:
    """Add to an int64 that threads share; gives its value before."""
    return builder.atomic_rmw("add", pointer, amount, "monotonic")


@emits(lambda address: types.void)
def prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Start bringing the cache line at that address nearer; any address is safe."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    read, near, data = (ir.Constant(word, value) for value in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, byte), read, near, data])


@emits(lambda bits: types.float64)
def double_of(builder: ir.IRBuilder, bits: Any) -> Any:
    """int64 -> the float64 of the same bits."""
    return builder.bitcast(bits, ir.DoubleType())


@emits(lambda value: types.int32)
def bits_of(builder: ir.IRBuilder, value: Any) -> Any:
    """float32 -> the int32 of the same bits."""
    return builder.bitcast(value, ir.IntType(32))
