"""Sixteen float32 in one variable, for kernels: loads, arithmetic, reductions in a written-down order.

LLVM splits a vector where the machine's are narrower; the bits of a result do not change. Pointers are to float32
or to bfloat16 (uint16): loads widen, stores round to the nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default

from kernels.compiled import emits, inlined

WIDTH = 16
FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
INTS = ir.VectorType(ir.IntType(32), WIDTH)
SHORTS = ir.VectorType(ir.IntType(16), WIDTH)
BITS = ir.VectorType(ir.IntType(1), WIDTH)


class Vector(types.Type):
    """numba's name for <16 x float>."""

    def __init__(self) -> None:
        super().__init__("vector of 16 float32")


@register_default(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, front_end: Any) -> None:
        super().__init__(manager, front_end, FLOATS)


VECTOR = Vector()


def _vector(*arguments: Any) -> Any:
    return VECTOR


def _float(*arguments: Any) -> Any:
    return types.float32


def _constant(value: int) -> Any:
    return ir.Constant(INTS, [value] * WIDTH)


def _spread(builder: ir.IRBuilder, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, WIDTH)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * WIDTH))


def _lanes_below(builder: ir.IRBuilder, count: Any) -> Any:
    count = builder.trunc(count, ir.IntType(32)) if count.type.width > 32 else count
    return builder.icmp_signed("<", ir.Constant(INTS, list(range(WIDTH))), _spread(builder, count))


def _widen(builder: ir.IRBuilder, shorts: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(shorts, INTS), _constant(16)), FLOATS)


def _narrow(builder: ir.IRBuilder, floats: Any) -> Any:
    """bfloat16 bits, nearest even; a NaN stays one."""
    bits = builder.bitcast(floats, INTS)
    odd = builder.and_(builder.lshr(bits, _constant(16)), _constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _constant(0x7FFF))), _constant(16))
    nan = builder.or_(builder.lshr(bits, _constant(16)), _constant(0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", floats, floats), nan, rounded), SHORTS)


def _call(builder: ir.IRBuilder, name: str, result: Any, *values: Any) -> Any:
    function_type = ir.FunctionType(result, [value.type for value in values])
    module = builder.module
    function = module.globals.get(name) or ir.Function(module, function_type, name)
    return builder.call(function, values)


def _place(builder: ir.IRBuilder, pointer: Any, index: Any) -> tuple[Any, Any, int]:
    """(pointer to a vector at that element, its type, alignment)."""
    short = pointer.type.pointee == ir.IntType(16)
    kind = SHORTS if short else FLOATS
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer()), kind, 2 if short else 4


@emits(_vector)
def load(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """Elements index … index + 15."""
    place, kind, align = _place(builder, pointer, index)
    value = builder.load(place, align=align)
    return _widen(builder, value) if kind is SHORTS else value


@emits(_vector)
def load_part(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any) -> Any:
    """The first `count` elements from index on, 0 in the other lanes."""
    place, kind, align = _place(builder, pointer, index)
    name = "llvm.masked.load.v16i16.p0" if kind is SHORTS else "llvm.masked.load.v16f32.p0"
    mask = _lanes_below(builder, count)
    zero = ir.Constant(kind, None)
    value = _call(builder, name, kind, place, ir.Constant(ir.IntType(32), align), mask, zero)
    return _widen(builder, value) if kind is SHORTS else value


@emits(lambda pointer, index, value: types.void)
def store(builder: ir.IRBuilder, pointer: Any, index: Any, value: Any) -> None:
    """Write elements index … index + 15."""
    place, kind, align = _place(builder, pointer, index)
    builder.store(_narrow(builder, value) if kind is SHORTS else value, place, align=align)


@emits(lambda pointer, index, value, count: types.void)
def store_part(builder: ir.IRBuilder, pointer: Any, index: Any, value: Any, count: Any) -> None:
    """Write the first `count` lanes from element `index` on."""
    place, kind, align = _place(builder, pointer, index)
    name = "llvm.masked.store.v16i16.p0" if kind is SHORTS else "llvm.masked.store.v16f32.p0"
    value = _narrow(builder, value) if kind is SHORTS else value
    mask = _lanes_below(builder, count)
    _call(builder, name, ir.VoidType(), value, place, ir.Constant(ir.IntType(32), align), mask)


@emits(_vector)
def splat(builder: ir.IRBuilder, scalar: Any) -> Any:
    """float32 in all lanes."""
    return _spread(builder, scalar)


@emits(_vector)
def fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _call(builder, "llvm.fma.v16f32", FLOATS, a, b, c)


@emits(_vector)
def add(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@emits(_vector)
def sub(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.fsub(a, b)


@emits(_vector)
def mul(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.fmul(a, b)


@emits(_vector)
def div(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


@emits(_vector)
def larger(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The larger per lane; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emits(_vector)
def smaller(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The smaller per lane; b where either is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@emits(_vector)
def keep_below(builder: ir.IRBuilder, count: Any, value: Any, otherwise: Any) -> Any:
    """`value` in lanes 0 … count - 1, `otherwise` in the rest. count may be negative or above 16."""
    return builder.select(_lanes_below(builder, count), value, otherwise)


@emits(_vector)
def round_to_bfloat(builder: ir.IRBuilder, value: Any) -> Any:
    """Nearest bfloat16 per lane, ties to even."""
    return _widen(builder, _narrow(builder, value))


@emits(_vector)
def power_of_two(builder: ir.IRBuilder, magic: Any) -> Any:
    """2**n per lane, where n was added to MAGIC."""
    exponent = builder.shl(builder.bitcast(magic, INTS), _constant(23))
    return builder.bitcast(builder.add(exponent, _constant(127 << 23)), FLOATS)


def _halves(builder: ir.IRBuilder, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine lane i with lane i + n/2, then halve, down to one lane."""
    count = WIDTH
    while count > 1:
        count //= 2
        none = ir.Constant(value.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(value, none, ir.Constant(ir.VectorType(ir.IntType(32), count), lanes))
            for lanes in (list(range(count)), list(range(count, 2 * count)))
        )
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


@emits(_float)
def sum_lanes(builder: ir.IRBuilder, value: Any) -> Any:
    """Sum of the lanes: i with i + 8, then i with i + 4, 2, 1."""
    return _halves(builder, value, builder.fadd)


@emits(_float)
def max_lanes(builder: ir.IRBuilder, value: Any) -> Any:
    """Largest lane; unspecified if one is NaN."""
    return _halves(builder, value, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


LOG2E = np.float32(1.4426950408889634)
MAGIC = np.float32(1.5 * 2**23)  # adding it rounds to an integer, kept in the low bits
EXP_LEAST, EXP_MOST = np.float32(-87.0), np.float32(88.0)
# 2**f for f in [-½, ½], within 1e-7; highest power first
EXP2 = tuple(
    np.float32(c)
    for c in (
        0.00015353361959569156,
        0.0013398875016719103,
        0.00961843691766262,
        0.055503323674201965,
        0.24022647738456726,
        0.6931471824645996,
        1.0,
    )
)


@inlined
def exp(x: Any) -> Any:
    """exp per lane within 2e-7 of its size; x outside [-87, 88] counts as the border; exp(0) is exactly 1."""
    x = smaller(splat(EXP_MOST), larger(splat(EXP_LEAST), x))
    magic = fma(x, splat(LOG2E), splat(MAGIC))
    f = fma(x, splat(LOG2E), sub(splat(MAGIC), magic))
    p = fma(splat(EXP2[0]), f, splat(EXP2[1]))
    p = fma(p, f, splat(EXP2[2]))
    p = fma(p, f, splat(EXP2[3]))
    p = fma(p, f, splat(EXP2[4]))
    p = fma(p, f, splat(EXP2[5]))
    p = fma(p, f, splat(EXP2[6]))
    return mul(p, power_of_two(magic))


# A chunk is 32 neighbouring elements in two vectors, low and high. Of float32 these are the first and the second
# sixteen; of bfloat16 the even and the odd ones, which takes one shift and one mask instead of two conversions.
# All who read the same kind of pointer see the same order, so it matters to nobody.
CHUNK = 32


def _masked_load(builder: ir.IRBuilder, place: Any, kind: Any, count: Any) -> Any:
    short = {FLOATS: "f32", INTS: "i32"}[kind]
    align, zero = ir.Constant(ir.IntType(32), 2 if kind is INTS else 4), ir.Constant(kind, None)
    return _call(builder, f"llvm.masked.load.v16{short}.p0", kind, place, align, _lanes_below(builder, count), zero)


def _chunk_half(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any, *, high: bool) -> Any:
    """One vector of the chunk at element `index`; with a count, only elements below it, 0 elsewhere."""
    long = ir.IntType(64)
    if pointer.type.pointee == ir.IntType(16):
        place = builder.bitcast(builder.gep(pointer, [index]), INTS.as_pointer())
        if count is None:
            both = builder.load(place, align=2)
        else:
            both = _masked_load(builder, place, INTS, builder.ashr(count, long(1)))
        half = builder.and_(both, _constant(-65536)) if high else builder.shl(both, _constant(16))
        return builder.bitcast(half, FLOATS)
    if high:
        index = builder.add(index, long(16))
        count = None if count is None else builder.sub(count, long(16))
    place = builder.bitcast(builder.gep(pointer, [index]), FLOATS.as_pointer())
    return builder.load(place, align=4) if count is None else _masked_load(builder, place, FLOATS, count)


@emits(_vector)
def load_low(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """The low vector of the chunk at element `index`."""
    return _chunk_half(builder, pointer, index, None, high=False)


@emits(_vector)
def load_high(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """The high vector of the chunk at element `index`."""
    return _chunk_half(builder, pointer, index, None, high=True)


@emits(_vector)
def load_low_part(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any) -> Any:
    """The same of the first `count` elements, an even number; 0 for the rest."""
    return _chunk_half(builder, pointer, index, count, high=False)


@emits(_vector)
def load_high_part(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any) -> Any:
    """The same of the first `count` elements, an even number; 0 for the rest."""
    return _chunk_half(builder, pointer, index, count, high=True)


@emits(lambda pointer, halves, count: types.void)
def store_chunk(builder: ir.IRBuilder, pointer: Any, halves: Any, count: Any) -> None:
    """Write the first `count` elements, an even number, of a chunk. halves: (low, high)."""
    low, high = (builder.extract_value(halves, i) for i in range(2))
    long, align = ir.IntType(64), ir.Constant(ir.IntType(32), 2)
    if pointer.type.pointee == ir.IntType(16):
        low, high = (builder.zext(_narrow(builder, half), INTS) for half in (low, high))
        both = builder.or_(low, builder.shl(high, _constant(16)))
        place = builder.bitcast(pointer, INTS.as_pointer())
        mask = _lanes_below(builder, builder.ashr(count, long(1)))
        _call(builder, "llvm.masked.store.v16i32.p0", ir.VoidType(), both, place, align, mask)
        return
    for half, first in ((low, 0), (high, 16)):
        place = builder.bitcast(builder.gep(pointer, [long(first)]), FLOATS.as_pointer())
        mask = _lanes_below(builder, builder.sub(count, long(first)))
        _call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), half, place, align, mask)


# The four rounds of `sum_rows`: which lanes of a pair of vectors are added to which others.
_QUADS = range(0, WIDTH, 4)
_ODD_QUADS = [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31]
_ROUNDS = (
    ([q + i for q in _QUADS for i in (0, 16, 1, 17)], [q + i for q in _QUADS for i in (2, 18, 3, 19)]),
    ([q + i for q in _QUADS for i in (0, 1, 16, 17)], [q + i for q in _QUADS for i in (2, 3, 18, 19)]),
    ([lane - 4 for lane in _ODD_QUADS], _ODD_QUADS),
    ([lane - 4 for lane in _ODD_QUADS], _ODD_QUADS),
)


@emits(_vector)
def sum_rows(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """Lane r is the sum of elements index + 16 r … index + 16 r + 15, for sixteen r; added in pairs."""
    long = ir.IntType(64)
    rows = []
    for r in range(WIDTH):
        place, _, align = _place(builder, pointer, builder.add(index, long(WIDTH * r)))
        rows.append(builder.load(place, align=align))
    for takes in _ROUNDS:
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [builder.fadd(*(builder.shuffle_vector(*pair, ir.Constant(INTS, take)) for take in takes))
                for pair in pairs]
    return rows[0]
