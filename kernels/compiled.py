"""How the CPU kernels are compiled: numba decorators, cached on disk, that take tensors as addresses.

A tensor argument is `tensor.data_ptr()`: unwrapping an array costs 1 µs each, an integer 0.03. An address does not say
what lies there, so a kernel exists once for each dtype: `per_dtype` makes them of one body. No kernel uses fast-math
flags, so what is written is what is computed, in that order; speed comes from `vector.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.cpu_features import TILES, features, is_amd
from slipstream.kernels.disk_cache import cache_on_disk, digest
from slipstream.kernels.inlining import inlined as inlined
from slipstream.kernels.kernel import Kernel

POINTER_TO: Any = types.CPointer
# The kind of a dtype: the type of its elements to numba, for which bfloat16 and float8_e4m3fn are bits.
KINDS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float8_e4m3fn: np.uint8,
}
F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why compiled kernels cannot run there; None if they can."""
    return None if dtype in (torch.float32, torch.bfloat16) else "float32 and bfloat16 only"


def _sources() -> str:
    """Digest of the package's sources, but those for GPUs alone, and of what numba does not ask of a CPU."""
    folder = Path(__file__).parent
    paths = (
        path
        for path in (*folder.glob("*.py"), *folder.glob("*/*.py"))
        if path.parent.name != "cuda" and not path.name.startswith(("cuda", "triton", "proof"))
    )
    return digest(paths, *sorted(TILES & features()))  # Linux may grant tiles in one process alone


SOURCES = _sources()
# How near a prefetch brings what is read once. 0 keeps it out of the outer caches, which is free on AMD's CPUs; Intel's
# then read memory at a third of their rate (Emerald Rapids: 5 GB/s a core, not 15), so there it goes to the second.
_ONCE = 0 if is_amd() else 1
# And what is read soon: into the first cache Intel's bring no more at a time than its 16 buffers hold.
_SOON = 3 if is_amd() else 1


def kernel(function: F) -> F:
    """Compile on first call for the types it is called with; keep the GIL (for kernels of microseconds)."""
    return _compile(function, nogil=False)


def long_kernel(function: F) -> F:
    """Like `kernel`, but lets other Python threads run meanwhile."""
    return _compile(function, nogil=True)


class PerDtype(dict[Any, R]):
    """By dtype, or tuple of dtypes and names, what `make` gives for their kinds; made when it is first asked for."""

    def __init__(self, make: Callable[..., R]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> R:
        parts = key if isinstance(key, tuple) else (key,)
        made = self[key] = self._make(*(one if isinstance(one, str) else KINDS[one] for one in parts))
        return made


def per_dtype(make: Callable[..., R]) -> PerDtype[R]:
    """Decorator of a function (*kinds) -> kernel: makes a kernel for each combination of dtypes that is asked for.

    The kernel finds the kinds in its closure, where they are constants to numba: see `pointer`. A name, such as that of
    an activation, stands there as it is.
    """
    return PerDtype(make)


def routine(function: F) -> F:
    """A function of kernels that is called rather than copied; the compiler may still decide to copy it."""
    compiled: F = numba.njit(function, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
    return compiled


def _compile(function: F, *, nogil: bool) -> F:
    name_after_closure(function)
    dispatcher: Any = numba.njit(function, error_model="numpy", nogil=nogil)
    cache_on_disk(dispatcher, SOURCES)
    compiled: Any = Kernel(function, dispatcher)
    return compiled  # type: ignore[no-any-return]


def name_after_closure(function: Callable[..., Any]) -> None:
    """Give kernels that one line of source makes for several dtypes different names, and so different cache files.

    In one file numba numbers them in the order of their compilation. Two processes that compile at the same time would
    give two of them the same number, and later ones run the code of the wrong dtype. Raises TypeError for a closure
    whose pickled contents, by which numba finds cached code, would differ from process to process.
    """
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        if not isinstance(value, type | int | str):
            raise TypeError(
                f"{function.__qualname__} has a {type(value).__name__} in its closure: it is not cached"
            )
        function.__qualname__ += f"-{value.__name__ if isinstance(value, type) else value}"


def emits(result: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a function (builder, *values) -> value that emits LLVM instructions into the calling kernel.

    result: the numba type of the value, or a function of those of the arguments that gives it.
    """

    def wrap(emit: Callable[..., Any]) -> Callable[..., Any]:
        def lower(*arguments: Any) -> Any:
            def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                return emit(builder, *values)

            given = result if isinstance(result, types.Type) else result(*arguments)
            return given(*arguments), generate

        arities: dict[int, Callable[..., Any]] = {  # numba reads the number of arguments off the signature
            0: lambda typing: lower(),
            1: lambda typing, a: lower(a),
            2: lambda typing, a, b: lower(a, b),
            3: lambda typing, a, b, c: lower(a, b, c),
            4: lambda typing, a, b, c, d: lower(a, b, c, d),
        }
        wrapped: Callable[..., Any] = intrinsic(arities[emit.__code__.co_argcount - 1])
        return wrapped

    return wrap


def constant(find: Callable[..., int | tuple[int, ...]]) -> Callable[..., Any]:
    """What a function finds for constants, in kernels: a number, or several. It costs no compilation of its own.

    Kernels give it a constant, or a tuple of as many as the function takes.
    """

    def typed(typing: Any, given: Any) -> Any:
        found = find(
            *(one.literal_value for one in (given if isinstance(given, types.BaseTuple) else (given,)))
        )
        is_one = isinstance(found, int)
        numbers = [ir.IntType(64)(number) for number in ((found,) if is_one else found)]

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return numbers[0] if is_one else cgutils.pack_array(builder, numbers)

        result = types.int64 if is_one else types.UniTuple(types.int64, len(numbers))
        return result(given), generate

    made: Callable[..., Any] = intrinsic(prefer_literal=True)(typed)
    return made


def _pointer(typing: Any, address: Any, kind: Any) -> Any:
    """Address -> pointer to elements of that kind, one of KINDS."""
    result = POINTER_TO(kind.dtype)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(result))

    return result(address, kind), generate


pointer: Callable[[Any, Any], Any] = intrinsic(_pointer)


@emits(POINTER_TO(types.float32))
def float_pointer(builder: ir.IRBuilder, address: Any) -> Any:
    """Address -> pointer to float32."""
    return builder.inttoptr(address, ir.FloatType().as_pointer())


@emits(POINTER_TO(types.int32))
def int_pointer(builder: ir.IRBuilder, address: Any) -> Any:
    """Address -> pointer to int32."""
    return builder.inttoptr(address, ir.IntType(32).as_pointer())


@emits(POINTER_TO(types.int64))
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


@emits(types.int64)
def address_of(builder: ir.IRBuilder, pointer: Any) -> Any:
    """Pointer -> address."""
    return builder.ptrtoint(pointer, ir.IntType(64))


@inlined
def on_line(address: int) -> int:
    """Where the first line of the cache, 64 bytes, begins from an address on."""
    return (address + 63) // 64 * 64


@emits(types.int64)
def fetch_add(builder: ir.IRBuilder, pointer: Any, amount: Any) -> Any:
    """Add to an int64 that threads share; gives its value before."""
    return builder.atomic_rmw("add", pointer, amount, "monotonic")


def emit_fetch_once(builder: ir.IRBuilder, address: Any) -> None:
    """As `fetch_once`, for what emits instructions itself."""
    _emit_prefetch(builder, address, nearness=_ONCE)


def _emit_prefetch(builder: ir.IRBuilder, address: Any, nearness: int) -> None:
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    read, near, data = (ir.Constant(word, value) for value in (0, nearness, 1))
    builder.call(function, [builder.inttoptr(address, byte), read, near, data])


@emits(types.void)
def prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Start bringing the cache line at that address nearer; any address is safe."""
    _emit_prefetch(builder, address, nearness=_SOON)


@emits(types.void)
def fetch_once(builder: ir.IRBuilder, address: Any) -> None:
    """The same for what is read once a pass: where the CPU can, past caches that hold what the interpreter needs."""
    emit_fetch_once(builder, address)


@emits(types.float64)
def double_of(builder: ir.IRBuilder, bits: Any) -> Any:
    """int64 -> the float64 of the same bits."""
    return builder.bitcast(bits, ir.DoubleType())


@emits(types.int32)
def bits_of(builder: ir.IRBuilder, value: Any) -> Any:
    """float32 -> the int32 of the same bits."""
    return builder.bitcast(value, ir.IntType(32))
