"""Thirty-two neighbouring elements at a time, and the sums of sixteen rows: what products over rows are made of.

A chunk is two vectors, low and high. Of float32 and float8 these are the first and the second sixteen elements; of
bfloat16 the even and the odd ones, which takes one shift and one mask instead of two conversions. Where one kind of
pointer is read beside another, the caller says whose order is meant.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from slipstream.kernels.compiled import emits
from slipstream.kernels.vector import (
    FLOATS,
    INTS,
    VECTOR,
    WIDTH,
    at_element,
    constant,
    fitted,
    kind_of,
    load_vector,
    narrow,
    store_lanes,
    widen,
)

CHUNK = 32


def _chunk_half(
    builder: ir.IRBuilder, pointer: Any, index: Any, count: Any, *, high: bool, alternating: bool = True
) -> Any:
    """One vector of the chunk at element `index`; with a count, only elements below it, 0 elsewhere.

    alternating: whether the halves of bfloat16 are the even and the odd elements.
    """
    long = ir.IntType(64)
    if pointer.type.pointee == ir.IntType(16) and alternating:
        place = builder.bitcast(builder.gep(pointer, [index]), INTS.as_pointer())
        both = load_vector(builder, place, None if count is None else builder.ashr(count, long(1)))
        half = builder.and_(both, constant(-65536)) if high else builder.shl(both, constant(16))
        return builder.bitcast(half, FLOATS)
    if high:
        index = builder.add(index, long(16))
        count = None if count is None else builder.sub(count, long(16))
    return widen(builder, load_vector(builder, at_element(builder, pointer, index), count))


def _alternates(like: Any) -> bool:
    return bool(like.type.pointee == ir.IntType(16))


@emits(VECTOR)
def load_low(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """The low vector of the chunk at element `index`."""
    return _chunk_half(builder, pointer, index, None, high=False)


@emits(VECTOR)
def load_high(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """The high vector of the chunk at element `index`."""
    return _chunk_half(builder, pointer, index, None, high=True)


@emits(VECTOR)
def load_low_part(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any) -> Any:
    """The same of the first `count` elements, an even number; 0 for the rest."""
    return _chunk_half(builder, pointer, index, count, high=False)


@emits(VECTOR)
def load_high_part(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any) -> Any:
    """The same of the first `count` elements, an even number; 0 for the rest."""
    return _chunk_half(builder, pointer, index, count, high=True)


@emits(VECTOR)
def load_low_as(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any, like: Any) -> Any:
    """As `load_low_part`, in the order in which chunks of `like`'s kind lie."""
    return _chunk_half(builder, pointer, index, count, high=False, alternating=_alternates(like))


@emits(VECTOR)
def load_high_as(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any, like: Any) -> Any:
    """The same of the high vector."""
    return _chunk_half(builder, pointer, index, count, high=True, alternating=_alternates(like))


@emits(types.void)
def store_chunk(builder: ir.IRBuilder, pointer: Any, halves: Any, count: Any, like: Any) -> None:
    """Write the first `count` elements, an even number, of a chunk.

    halves: (low, high), in the order in which chunks of `like`'s kind lie.
    """
    low, high = (builder.extract_value(halves, i) for i in range(2))
    long = ir.IntType(64)
    if pointer.type.pointee == ir.IntType(16) and _alternates(like):
        low, high = (builder.zext(narrow(builder, half), INTS) for half in (low, high))
        both = builder.or_(low, builder.shl(high, constant(16)))
        place = builder.bitcast(pointer, INTS.as_pointer())
        store_lanes(builder, place, both, builder.ashr(count, long(1)))
        return
    for half, first in ((low, 0), (high, 16)):
        place = at_element(builder, pointer, long(first))
        value = fitted(builder, half, kind_of(pointer))
        store_lanes(builder, place, value, builder.sub(count, long(first)))


# The four rounds of `sum_rows`: which lanes of a pair of vectors are added to which others.
_QUADS = range(0, WIDTH, 4)
_ODD_QUADS = [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31]
_ROUNDS = (
    ([q + i for q in _QUADS for i in (0, 16, 1, 17)], [q + i for q in _QUADS for i in (2, 18, 3, 19)]),
    ([q + i for q in _QUADS for i in (0, 1, 16, 17)], [q + i for q in _QUADS for i in (2, 3, 18, 19)]),
    ([lane - 4 for lane in _ODD_QUADS], _ODD_QUADS),
    ([lane - 4 for lane in _ODD_QUADS], _ODD_QUADS),
)


@emits(VECTOR)
def sum_rows(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """Lane r is the sum of elements index + 16 r … index + 16 r + 15, for sixteen r; added in pairs."""
    long = ir.IntType(64)
    starts = [builder.add(index, long(WIDTH * r)) for r in range(WIDTH)]
    rows = [load_vector(builder, at_element(builder, pointer, start)) for start in starts]
    for takes in _ROUNDS:
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [
            builder.fadd(*(builder.shuffle_vector(*pair, ir.Constant(INTS, take)) for take in takes))
            for pair in pairs
        ]
    return rows[0]
