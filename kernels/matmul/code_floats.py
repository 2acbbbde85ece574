"""Codes of a record as float32, for fused multiply-adds: inputs in float32, and fp8 on CPUs without bf16 or AMX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from llvmlite import ir

from slipstream.kernels.matmul.emit import (
    FLOAT,
    PAIRS,
    PANEL,
    Emitter,
    Row,
    Value,
    Way,
    all_of,
    all_rows,
    as_it_is,
    lanes_of,
    load_at,
    shorts,
    spread,
)
from slipstream.kernels.matmul.formats import CHUNK, BlockFormat
from slipstream.kernels.vector import FLOATS, INTS, IS_WIDE, WIDTH, call_intrinsic, constant

FEATURES = ("avx2", "fma", "f16c", "bmi2")  # of the CPU; the last two read halves and pack codes
_EIGHT, _BYTES = ir.VectorType(ir.FloatType(), 8), ir.VectorType(ir.IntType(8), 32)
_ALL = list(range(WIDTH))


def _floats(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[list[Value]]:
    """Values of 16 outputs and 32 inputs, two neighbouring inputs at a time: 16 times two vectors of float32.

    words: the address of their first word.
    """
    bits, loaded = form.bits, {}
    for step in range(CHUNK // 2):
        first, shift = divmod(step * bits, 16)
        last = (step * bits + bits - 1) // 16
        for i in {first, last} - loaded.keys():
            loaded[i] = load_at(builder, PAIRS, words, i * PANEL * 4)
        word = loaded[first]
        if last > first:  # a code begins in one word and ends in the next
            low = builder.lshr(word, shorts([shift] * 2 * WIDTH))
            word = builder.or_(low, builder.shl(loaded[last], shorts([16 - shift] * 2 * WIDTH)))
            shift = 0
        lanes = builder.bitcast(word, INTS)  # of an even input's word below an odd one's
        yield [_values(builder, form, lanes, at) for at in (shift, 16 + shift)]


def _values(builder: Emitter, form: BlockFormat, lanes: Value, at: int) -> Value:
    """The numbers that codes stand for, which begin at that bit of the lanes."""
    least, bits = int(form.values[0]), form.bits
    if form.values == tuple(range(least, least + len(form.values))):
        code = _low(builder, lanes, at)
        code = code if at + bits == 32 else builder.and_(code, constant((1 << bits) - 1))
        return builder.sitofp(builder.add(code, constant(least)) if least else code, FLOATS)
    if bits == 8:
        return _float8(builder, lanes, at)
    code = _low(builder, lanes, at)
    if list(form.values[8:]) == [-value for value in form.values[:8]]:
        top = builder.shl(lanes, constant(32 - bits - at)) if at + bits < 32 else lanes
        return _signed(builder, _by_halves(builder, code, partial(_one_of_eight, form.values[:8])), top)
    code = builder.and_(code, constant((1 << bits) - 1))
    found = _by_halves(builder, code, partial(_one_of_sixteen, form.values))
    return builder.sitofp(builder.ashr(builder.shl(found, constant(24)), constant(24)), FLOATS)


def _low(builder: Emitter, lanes: Value, at: int) -> Value:
    """The lanes with a code at the lowest bits, and others above it."""
    return builder.lshr(lanes, constant(at)) if at else lanes


def _signed(builder: Emitter, size: Value, top: Value) -> Value:
    """The numbers, negative where the highest bit of `top` is set."""
    sign = builder.and_(top, constant(-1 << 31))
    return builder.bitcast(builder.or_(builder.bitcast(size, INTS), sign), FLOATS)


def _float8(builder: Emitter, lanes: Value, at: int) -> Value:
    """Four bits of exponent and three of mantissa below a sign; codes are none of NaN."""
    top = builder.shl(lanes, constant(24 - at)) if at < 24 else lanes
    rest = builder.and_(builder.lshr(top, constant(4)), constant(0x7F << 20))
    # As if there were a leading one. Without an exponent there is none: the number is twice that less 2^-6, which is
    # the smaller of the two just there.
    normal = builder.bitcast(builder.add(rest, constant(120 << 23)), FLOATS)
    two, less = (ir.Constant(FLOATS, [number] * WIDTH) for number in (2.0, -(2.0**-6)))
    tiny = call_intrinsic(builder, "llvm.fma.v16f32", FLOATS, normal, two, less)
    return _signed(builder, builder.select(builder.fcmp_ordered("<", tiny, normal), tiny, normal), top)


def _by_halves(builder: Emitter, code: Value, look_up: Callable[[Emitter, Value], Value]) -> Value:
    """What a function of 8 lanes makes of 16."""
    halves = (look_up(builder, lanes_of(builder, code, lanes)) for lanes in (_ALL[:8], _ALL[8:]))
    return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), _ALL))


def _one_of_eight(values: Sequence[float], builder: Emitter, code: Value) -> Value:
    """The number that the lowest three bits of each lane stand for."""
    table = ir.Constant(_EIGHT, list(values))
    return call_intrinsic(builder, "llvm.x86.avx2.permps", _EIGHT, table, code)


def _one_of_sixteen(values: Sequence[float], builder: Emitter, code: Value) -> Value:
    """In the lowest byte of each lane the whole number that it stands for; other bytes are of no code."""
    table = ir.Constant(_BYTES, [int(value) & 255 for value in values] * 2)
    found = call_intrinsic(builder, "llvm.x86.avx2.pshuf.b", _BYTES, table, builder.bitcast(code, _BYTES))
    return builder.bitcast(found, ir.VectorType(ir.IntType(32), 8))


def _inputs(builder: Emitter, x: Value, step: int, row: Row) -> list[Value]:
    """Two inputs, each in all lanes. x: float32 [16 steps, n_rows, 2]."""
    place = (step * row.n_rows + row.index) * 8
    return [spread(builder, load_at(builder, FLOAT, x, place + 4 * i), FLOATS) for i in range(2)]


def _add(builder: Emitter, total: list[Value], inputs: list[Value], values: list[Value]) -> list[Value]:
    """total + x₀w₀ + x₁w₁."""
    for x, value in zip(inputs, values, strict=True):
        total = [call_intrinsic(builder, "llvm.fma.v16f32", FLOATS, x, value, total[0])]
    return total


_AT_ONCE = all_rows({8: 2, 4: 4, 1: 4} if IS_WIDE else {4: 1, 1: 2})
WAY = Way(2, [FLOATS] * 2, _floats, _inputs, [all_of(0.0)], _add, as_it_is, _AT_ONCE)
