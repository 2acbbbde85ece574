"""Inputs rounded to eight bits ("A8"), as llama.cpp rounds them, times codes as the bytes of `code_bytes.py`.

Of each 32 inputs the largest is 127 steps, and the others are the nearest whole numbers of steps. So an input is one
byte, not two, and the instruction for bytes multiplies twice as many at once. A group's sum is one of integers, exact,
then it is rounded to float32, once: it does not matter what multiplies, and all CPUs have the same bits.

Besides VNNI and AMX's tiles that is, without VNNI, the instruction that adds two products of bytes as a short
(vpmaddubsw), for codes of at most six bits; and on AMD's wide CPUs, for a lone row whose groups have 32 inputs, the one
for pairs of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from llvmlite import ir
from numba import types

from slipstream.kernels.amx import HAS_TILES
from slipstream.kernels.compiled import emits
from slipstream.kernels.matmul import code_bytes, code_shorts
from slipstream.kernels.matmul.code_bytes import (
    HAS_VNNI,
    UNIT,
    codes_of,
    dot,
    field_of,
    largest_of,
    store_bytes,
    store_shorts,
    whole_numbers,
    zero_of,
)
from slipstream.kernels.matmul.code_pairs import IS_QUICK
from slipstream.kernels.matmul.code_shorts import LANES, PRODUCTS, now
from slipstream.kernels.matmul.emit import (
    CODES,
    FLOAT,
    INT,
    PAIRS,
    SHORT,
    Emitter,
    Fields,
    Row,
    Value,
    Way,
    lanes_of,
    load_at,
    spread,
)
from slipstream.kernels.matmul.formats import CHUNK, BlockFormat
from slipstream.kernels.pairs import BFLOATS
from slipstream.kernels.vector import FLOATS, INTS, IS_WIDE, WIDTH, call_intrinsic, constant

MOST = 127  # steps of the largest input
LEAST_EXPONENT = 32  # as bfloat16 has it, of what is largest: smaller inputs become fewer steps, or none
IS_LAID_WIDE = (IS_QUICK and not HAS_TILES) or not HAS_VNNI  # inputs are in 16 bits, too
INPUT_BYTES = 3 if IS_LAID_WIDE else 1  # of an input as it lies in a tile
AHEAD = 8192  # of `Way`: there is less to do between the records


@emits(types.void)
def lay_steps(builder: Emitter, source: Value, targets: Value, fields: Value) -> None:
    """Make bytes [32] of 32 bfloat16, and write their step and the sums of these to the fields, as `find_unit` does.

    targets: where bytes lie, and where the same numbers in 16 bits, if the CPU wants these: shorts, or bfloat16.
    """
    step = _step(builder, largest_of(builder, source))
    builder.store(step, field_of(builder, fields, UNIT))
    steps = spread(builder, builder.fdiv(ir.Constant(FLOAT, 1.0), step), FLOATS)
    target, wide = (builder.extract_value(targets, i) for i in range(2))
    for i, whole in enumerate(whole_numbers(builder, source, steps, fields)):
        store_bytes(builder, whole, target, WIDTH * i)
        if not HAS_VNNI:
            store_shorts(builder, whole, wide, 2 * WIDTH * i)
        elif IS_LAID_WIDE:
            bits = builder.bitcast(builder.sitofp(whole, FLOATS), INTS)
            store_shorts(builder, builder.lshr(bits, constant(16)), wide, 2 * WIDTH * i)


def _step(builder: Emitter, most: Value) -> Value:
    """A 127th of the largest, of which these are the bits; of what is infinite or no number, no number."""
    least = INT(LEAST_EXPONENT << 7)
    kept = builder.select(builder.icmp_unsigned(">", most, least), most, least)
    largest = builder.bitcast(builder.shl(kept, INT(16)), FLOAT)
    step = builder.fdiv(largest, ir.Constant(FLOAT, float(MOST)))
    is_number = builder.icmp_unsigned("<", most, INT(0x7F80))
    return builder.select(is_number, step, ir.Constant(FLOAT, float("nan")))


def _fours(builder: Emitter, x: Value, step: int, row: Row) -> list[Value]:
    """Four inputs in all lanes."""
    return [spread(builder, load_at(builder, INT, x, row.index * CHUNK + step * 4), INTS)]


def _twos(kind: Value) -> Callable[[Emitter, Value, int, Row], list[Value]]:
    """Two inputs of 16 bits in all lanes, as vectors of that type."""

    def inputs(builder: Emitter, x: Value, step: int, row: Row) -> list[Value]:
        at = (row.n_rows + 2 * row.index) * CHUNK + step * 4
        return [builder.bitcast(spread(builder, load_at(builder, INT, x, at), INTS), kind)]

    return inputs


def _add(builder: Emitter, total: list[Value], inputs: list[Value], values: list[Value]) -> list[Value]:
    """Four products of 16 outputs each."""
    return [dot(builder, total[0], values[0], inputs[0])]


def _floats_of_pairs(builder: Emitter, form: BlockFormat, total: list[Value], fields: Fields) -> Value:
    """`code_shorts.floats` of sums that are float32, and as exact: below 2^24 steps."""
    step = load_at(builder, FLOAT, fields.address, fields.offset(UNIT))
    return builder.fmul(total[0], spread(builder, step, FLOATS))


def _codes_of_eight(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[list[Value]]:
    """Codes of 16 outputs and 32 inputs, eight inputs at a time."""
    fours = codes_of(builder, form, words)
    return ([*first, *second] for first, second in zip(fours, fours, strict=True))


def _eights(builder: Emitter, x: Value, step: int, row: Row) -> list[Value]:
    return [of for i in range(2) for of in _fours(builder, x, 2 * step + i, row)]


def _add_eights(
    builder: Emitter, total: list[Value], inputs: list[Value], values: list[Value]
) -> list[Value]:
    """Eight products of 16 outputs each: four make a sum of 16 bits, and two of these are added up."""
    sums = ir.VectorType(SHORT, 2 * LANES)
    name = "llvm.x86.avx512.pmaddubs.w.512" if IS_WIDE else "llvm.x86.avx2.pmadd.ub.sw"
    added = []
    for i, one in enumerate(total):
        lanes = list(range(4 * LANES * i, 4 * LANES * (i + 1)))
        fours = []
        for codes, x in zip(values, inputs, strict=True):
            parts = (lanes_of(builder, of, lanes) for of in (codes, builder.bitcast(x, CODES)))
            fours.append(call_intrinsic(builder, name, sums, *parts))
        ones = ir.Constant(sums, [1] * 2 * LANES)
        eight = call_intrinsic(builder, PRODUCTS, one.type, builder.add(*fours), ones)
        added.append(now(builder, builder.add(one, eight)))
    return added


_COLUMNS = {8: 1, 4: 4, 1: 4} if IS_WIDE else {4: 2, 1: 1}


def _at_once(form: BlockFormat, n_rows: int) -> tuple[int, int]:
    """As of `code_bytes.py`: memory is read in its order where a code is a byte."""
    return (2, 4) if IS_WIDE and form.bits == 8 and n_rows > 1 else (n_rows, _COLUMNS[n_rows])


_BYTES = replace(
    code_bytes.WAY,
    inputs=_fours,
    zeros=[constant(0)],
    add=_add,
    floats=code_shorts.floats,
    at_once=_at_once,
    ahead=AHEAD,
    n_followed=4,
)
_SIGNED_BYTES = replace(_BYTES, codes=code_bytes.SIGNED.codes, floats=code_shorts.floats_of_signed)
_PAIRS = replace(code_bytes.UNITS, inputs=_twos(BFLOATS), floats=_floats_of_pairs)
_SHORTS = replace(code_shorts.WAY, inputs=_twos(PAIRS))
_SIGNED_SHORTS = replace(code_shorts.SIGNED, inputs=_twos(PAIRS))
_EIGHTS = replace(
    code_shorts.WAY,
    n_inputs=8,
    kinds=[CODES, CODES],
    codes=_codes_of_eight,
    inputs=_eights,
    add=_add_eights,
)


def way_of(form: BlockFormat, n_rows: int) -> Way:
    """What multiplies a type with a tile of so many rows."""
    if HAS_VNNI:
        return _PAIRS if IS_LAID_WIDE and n_rows == 1 and form.bits < 8 and form.group == CHUNK else _BYTES
    return _EIGHTS if _fits_eights(form) else _SHORTS


def signed_way_of(form: BlockFormat, n_rows: int) -> Way:
    """The same where codes are laid down once for many rows."""
    if HAS_VNNI:
        return _SIGNED_BYTES
    return _EIGHTS if _fits_eights(form) else _SIGNED_SHORTS


def _fits_eights(form: BlockFormat) -> bool:
    """Whether a short holds the sum of four products of codes from 0 on."""
    return 4 * MOST * (max(form.values) + zero_of(form)) < 2**15
