"""Products of codes as bytes for CPUs without VNNI: by the instruction that adds two products of 16 bits (vpmaddwd).

Codes and inputs are the integers of `code_bytes.py`, but inputs are not cut into bytes. A group's sum is the same, and
exact. Of four neighbouring inputs the first and third are multiplied together, whose codes are the lower bytes of a
word's halves, then the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llvmlite import ir

from slipstream.kernels.matmul.code_bytes import codes_of, floats_of, in_units, joined, zero_of
from slipstream.kernels.matmul.emit import (
    CODES,
    INT,
    PAIRS,
    Emitter,
    Fields,
    Row,
    Value,
    Way,
    all_rows,
    lanes_of,
    load_at,
    shorts,
    spread,
)
from slipstream.kernels.matmul.formats import CHUNK, BlockFormat
from slipstream.kernels.vector import INTS, IS_WIDE, WIDTH, call_intrinsic

LANES = WIDTH if IS_WIDE else WIDTH // 2  # outputs of one of the CPU's vectors
PRODUCTS = "llvm.x86.avx512.pmaddw.d.512" if IS_WIDE else "llvm.x86.avx2.pmadd.wd"


def _codes(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[list[Value]]:
    """Codes of 16 outputs and 32 inputs, two inputs at a time, as shorts: 16 times a vector."""
    for codes in codes_of(builder, form, words):
        two = builder.bitcast(codes[0], PAIRS)
        yield [builder.bitcast(builder.and_(two, shorts([0xFF] * 2 * WIDTH)), CODES)]
        yield [builder.bitcast(builder.lshr(two, shorts([8] * 2 * WIDTH)), CODES)]


def _signed(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[list[Value]]:
    """What codes stand for, not less the least of it: shorts have room for a sign."""
    zero = shorts([zero_of(form)] * 2 * WIDTH)
    for codes in _codes(builder, form, words):
        two = builder.bitcast(codes[0], PAIRS)
        yield [builder.bitcast(builder.sub(two, zero), CODES) if zero_of(form) else codes[0]]


def _inputs(builder: Emitter, x: Value, step: int, row: Row) -> list[Value]:
    """Two inputs in all lanes. x: shorts [n_rows, 32], of each four in the order in which they are multiplied."""
    at = row.index * 2 * CHUNK + step * 4
    return [builder.bitcast(spread(builder, load_at(builder, INT, x, at), INTS), PAIRS)]


def _add(builder: Emitter, total: list[Value], inputs: list[Value], values: list[Value]) -> list[Value]:
    """Two products of 16 outputs each, in as many vectors as hold these."""
    codes, x = builder.bitcast(values[0], PAIRS), inputs[0]
    added = []
    for i, one in enumerate(total):
        lanes = list(range(2 * LANES * i, 2 * LANES * (i + 1)))
        parts = (lanes_of(builder, of_all, lanes) for of_all in (codes, x))
        products = call_intrinsic(builder, PRODUCTS, one.type, *parts)
        added.append(now(builder, builder.add(one, products)))
    return added


def now(builder: Emitter, vector: Value) -> Value:
    """The vector, computed here: else compilers first add products to each other, and run out of registers."""
    form = ir.FunctionType(vector.type, [vector.type])
    return builder.asm(form, "", "=v,0", [vector], side_effect=True)


def floats(builder: Emitter, form: BlockFormat, total: list[Value], fields: Fields) -> Value:
    """A group's sums in float32: of one vector, or of two halves."""
    return floats_of(builder, form, joined(builder, total), fields)


def floats_of_signed(builder: Emitter, form: BlockFormat, total: list[Value], fields: Fields) -> Value:
    """The same of numbers that are their own."""
    return in_units(builder, joined(builder, total), fields)


WAY = Way(
    2,
    [CODES],
    _codes,
    _inputs,
    [ir.Constant(ir.VectorType(INT, LANES), [0] * LANES)] * (WIDTH // LANES),
    _add,
    floats,
    all_rows({8: 2, 4: 4, 1: 4} if IS_WIDE else {4: 1, 1: 4}),
)
SIGNED = replace(WAY, codes=_signed, floats=floats_of_signed)  # laid down once for many rows
