"""Words of two bfloat16, for attention in tiles: rounded weights, values that are not finite, columns made rows."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from slipstream.kernels.compiled import emits
from slipstream.kernels.vector import FLOATS, INTS, VECTOR, WIDTH, constant

HALVES = ir.VectorType(ir.IntType(16), 2 * WIDTH)


def _bits(builder: ir.IRBuilder, *values: Any) -> Any:
    return [builder.bitcast(value, INTS) for value in values]


@emits(VECTOR)
def alone_low(builder: ir.IRBuilder, value: Any) -> Any:
    """Words with the bfloat16 that are the high halves of `value` below, and 0 above."""
    (bits,) = _bits(builder, value)
    return builder.bitcast(builder.lshr(bits, constant(16)), FLOATS)


@emits(VECTOR)
def round_half_up(builder: ir.IRBuilder, value: Any) -> Any:
    """The nearest bfloat16 of numbers that are not negative, as float32; a NaN stays one."""
    (bits,) = _bits(builder, value)
    return builder.bitcast(builder.and_(builder.add(bits, constant(0x8000)), constant(-65536)), FLOATS)


@emits(VECTOR)
def largest_halves(builder: ir.IRBuilder, sizes: Any, words: Any) -> Any:
    """The larger of each half's bits but the sign, as whole numbers, and of those in `sizes`."""
    words = builder.bitcast(builder.and_(*_bits(builder, words), constant(0x7FFF7FFF)), HALVES)
    sizes = builder.bitcast(sizes, HALVES)
    return builder.bitcast(builder.select(builder.icmp_unsigned(">", sizes, words), sizes, words), FLOATS)


@emits(types.boolean)
def all_finite(builder: ir.IRBuilder, sizes: Any) -> Any:
    """Whether all values are finite whose largest bits these are."""
    limit = ir.Constant(HALVES, [0x7F80] * (2 * WIDTH))
    odd = builder.icmp_unsigned(">=", builder.bitcast(sizes, HALVES), limit)
    found = builder.bitcast(odd, ir.IntType(2 * WIDTH))
    return builder.zext(builder.icmp_unsigned("==", found, found.type(0)), ir.IntType(1))


_LANES = range(WIDTH)
# Shuffles of the four rounds, each of a pair of vectors: words of neighbouring rows, pairs of words, then quarters.
_QUARTERS = [range(q, q + 4) for q in range(0, 2 * WIDTH, 4)]


def _unpacked(first: int) -> tuple[list[int], list[int]]:
    """first: 1 interleaves words within quarters, 2 pairs of words."""
    low, high = [], []
    for q in range(0, WIDTH, 4):
        for out, begin in ((low, 0), (high, 2)):
            if first == 1:
                out += [q + begin, WIDTH + q + begin, q + begin + 1, WIDTH + q + begin + 1]
            else:
                out += [q + begin, q + begin + 1, WIDTH + q + begin, WIDTH + q + begin + 1]
    return low, high


_EVEN_QUARTERS = [lane for q in (0, 2, 4, 6) for lane in _QUARTERS[q]]
_ODD_QUARTERS = [lane for q in (1, 3, 5, 7) for lane in _QUARTERS[q]]


@emits(types.void)
def turn(builder: ir.IRBuilder, rows_at: Any) -> None:
    """Sixteen rows of sixteen words become their columns, in the same place. rows_at: pointer to float32."""

    def place(i: int) -> Any:
        return builder.bitcast(builder.gep(rows_at, [ir.IntType(64)(WIDTH * i)]), FLOATS.as_pointer())

    def both(a: Any, b: Any, takes: Any) -> Any:
        return [builder.shuffle_vector(a, b, ir.Constant(INTS, take)) for take in takes]

    rows = [builder.load(place(i), align=4) for i in _LANES]
    # Vector 2 i + h: columns 2 h and 2 h + 1 of each quarter, of rows 2 i and 2 i + 1 in turn.
    pairs = [v for i in range(0, WIDTH, 2) for v in both(rows[i], rows[i + 1], _unpacked(1))]
    # Vector 4 i + c: column c of each quarter, rows 4 i … 4 i + 3.
    fours = [None] * WIDTH
    for i in range(0, WIDTH, 4):
        for h in range(2):
            fours[i + 2 * h], fours[i + 2 * h + 1] = both(pairs[i + h], pairs[i + 2 + h], _unpacked(2))
    for c in range(4):
        # Quarters 0, 2 and 1, 3 of rows 0 … 7, then of the others.
        a = both(fours[c], fours[4 + c], (_EVEN_QUARTERS, _ODD_QUARTERS))
        b = both(fours[8 + c], fours[12 + c], (_EVEN_QUARTERS, _ODD_QUARTERS))
        for odd in range(2):
            for high, column in enumerate(both(a[odd], b[odd], (_EVEN_QUARTERS, _ODD_QUARTERS))):
                builder.store(column, place(4 * (odd + 2 * high) + c), align=4)
