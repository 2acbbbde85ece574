"""Codes of a record as float32, for fused multiply-adds: on CPUs with AVX2, and for inputs in float32 on any."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from slipstream.kernels.matmul.emit import PAIRS, PANEL, Emitter, Value, lanes_of, load_at, shorts
from slipstream.kernels.matmul.formats import CHUNK, BlockFormat
from slipstream.kernels.vector import FLOATS, INTS, WIDTH, call_intrinsic, constant

FEATURES = ("avx2", "fma", "f16c", "bmi2")  # of the CPU; the last two read halves and pack codes
_HALF = ir.VectorType(ir.IntType(8), 2 * WIDTH)  # bytes of 8 lanes


def floats(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[list[Value]]:
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
        yield [_values(builder, form, _code(builder, lanes, at, bits)) for at in (shift, 16 + shift)]


def _code(builder: Emitter, lanes: Value, at: int, bits: int) -> Value:
    """The bits of each lane from a place on."""
    if at:
        lanes = builder.lshr(lanes, constant(at))
    return lanes if at + bits == 32 else builder.and_(lanes, constant((1 << bits) - 1))


def _values(builder: Emitter, form: BlockFormat, code: Value) -> Value:
    """The numbers that codes stand for: whole ones that follow each other, float8's, or those of a table of 16."""
    least = int(form.values[0])
    if form.values == tuple(range(least, least + len(form.values))):
        return builder.sitofp(builder.add(code, constant(least)) if least else code, FLOATS)
    if form.bits == 8:
        return _float8(builder, code)
    halves = [_look_up(builder, form.values, lanes_of(builder, code, lanes)) for lanes in _LANES]
    both = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), list(range(WIDTH)))
    found = builder.shuffle_vector(*halves, both)
    upper = constant(24)
    return builder.sitofp(builder.ashr(builder.shl(found, upper), upper), FLOATS)


def _float8(builder: Emitter, code: Value) -> Value:
    """Four bits of exponent and three of mantissa below a sign; codes are none of NaN."""
    sign = builder.shl(builder.and_(code, constant(0x80)), constant(24))
    rest = builder.shl(builder.and_(code, constant(0x7F)), constant(20))
    # As if there were a leading one; without an exponent there is none, and it has to be taken away.
    normal = builder.bitcast(builder.add(rest, constant(120 << 23)), FLOATS)
    tiny = builder.bitcast(builder.add(rest, constant(121 << 23)), FLOATS)
    tiny = builder.fsub(tiny, ir.Constant(FLOATS, [2.0**-6] * WIDTH))
    found = builder.select(builder.icmp_signed("<", rest, constant(8 << 20)), tiny, normal)
    return builder.bitcast(builder.or_(builder.bitcast(found, INTS), sign), FLOATS)


_LANES = list(range(WIDTH // 2)), list(range(WIDTH // 2, WIDTH))


def _look_up(builder: Emitter, values: tuple[float, ...], code: Value) -> Value:
    """In the lowest byte of each of 8 lanes, the number that stands for its code; above it is what 0 stands for."""
    table = ir.Constant(_HALF, [int(value) & 255 for value in values] * 2)
    code = builder.bitcast(code, _HALF)
    found = call_intrinsic(builder, "llvm.x86.avx2.pshuf.b", _HALF, table, code)
    return builder.bitcast(found, ir.VectorType(ir.IntType(32), WIDTH // 2))
