"""Codes of a record as bytes, for the CPU's instruction that adds four products of integers at once (VNNI).

Where a CPU has none, `code_shorts.py` multiplies the same integers two at a time. Where sums of a group fit float32,
AMX's tiles and AMD's CPUs multiply them as bfloat16 (`UNITS`): the sums are as exact, and nothing is left to convert.

Codes become whole numbers from 0 on: what each stands for, less the least of them. Inputs are integers, too, of two
bytes that share a power of two with all 32 of a chunk: x = unit * (256 * high + low). So a group's sum is one of
integers, exact, the same in whatever order it is added; then it is rounded to float32, once.

Of bfloat16 inputs, all above 2^-7 of the chunk's largest are such integers as they are. Smaller ones are rounded by at
most 2^-15 of the power of two below the largest, a 128th of the step that bfloat16 itself has there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llvmlite import ir
from numba import types

from slipstream.kernels.compiled import emits
from slipstream.kernels.cpu_features import missing
from slipstream.kernels.matmul import code_pairs
from slipstream.kernels.matmul.code_pairs import bfloat_bits
from slipstream.kernels.matmul.emit import (
    BYTE,
    CODES,
    FLOAT,
    INT,
    LONG,
    PAIRS,
    PANEL,
    SHORT,
    Emitter,
    Fields,
    Row,
    Value,
    Way,
    all_of,
    lanes_of,
    load_at,
    shorts,
    spread,
)
from slipstream.kernels.matmul.formats import CHUNK, BlockFormat
from slipstream.kernels.pairs import BFLOATS
from slipstream.kernels.vector import (
    BYTES,
    FLOATS,
    INTS,
    IS_WIDE,
    SHORTS,
    WIDTH,
    call_intrinsic,
    constant,
)

HALF = ir.VectorType(BYTE, 2 * WIDTH)
FEATURES = ("avx512bw",) if IS_WIDE else ("avx2",)  # of the CPU
HAS_VNNI = not missing(["avx512vnni" if IS_WIDE else "avxvnni"])
# Fields of 32 inputs: the unit, float32; the sums of integers, int32, of all, of the first 16, of the others.
UNIT, SUMS = 3, 4
HIGHEST = 14  # power of two, in units, of the largest input
LEAST_EXPONENT = 32  # as bfloat16 has it, of what is largest: smaller inputs become fewer units, or none
# Of each four inputs the first and third, whose codes are the lower bytes of a word's halves, then the others.
_IN_PAIRS = [4 * four + i for four in range(WIDTH // 4) for i in (0, 2, 1, 3)]
_MAGIC = 1.5 * 2.0**23  # added to a float32 below 2^22, it leaves the nearest whole number in the lowest bits


def has_whole_numbers(form: BlockFormat) -> bool:
    """Whether codes of the type stand for whole numbers, none more than 255 above the least."""
    return (
        all(float(value).is_integer() for value in form.values) and max(form.values) - min(form.values) < 256
    )


def zero_of(form: BlockFormat) -> int:
    """The byte that stands for 0."""
    return -int(min(form.values))


def words_of(bits: int) -> list[tuple[int, int, int]]:
    """What the words of codes of so many bits hold, as they lie: (bits, bits before them, the first four inputs).

    A word has those bits of each of 32 / bits inputs: of the first four in its bytes' lowest bits, of the next above
    them. So a code of six bits is in one of four words and in one of two; they lie in the order of their inputs.
    """
    parts = [n for n in (8, 4, 2, 1) if bits & n]
    words = [(n, sum(parts[:i]), k * (8 // n)) for i, n in enumerate(parts) for k in range(n)]
    return sorted(words, key=lambda word: word[2])


def codes_of(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[list[Value]]:
    """Bytes of 16 outputs and 32 inputs, four neighbouring inputs at a time: 8 times a vector."""
    return ([_looked_up(builder, form, codes)] for codes in _stored(builder, form, words))


def _stored(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[Value]:
    """The codes themselves, in bytes."""
    for step in range(CHUNK // 4):
        code = None
        for i, (bits, before, first) in enumerate(words_of(form.bits)):
            if not first <= step < first + 8 // bits:
                continue
            part = load_at(builder, INTS, words, i * PANEL * 4)
            part = _moved(builder, part, before - (step - first) * bits)
            if bits < 8:
                part = builder.and_(part, constant(((1 << bits) - 1 << before) * 0x01010101))
            code = part if code is None else builder.or_(code, part)
        yield builder.bitcast(code, CODES)


def _moved(builder: Emitter, word: Value, by: int) -> Value:
    """Shifted to the left, or to the right where it is negative."""
    return builder.shl(word, constant(by)) if by > 0 else builder.lshr(word, constant(-by)) if by else word


def _looked_up(builder: Emitter, form: BlockFormat, codes: Value) -> Value:
    """What codes stand for, less the least of it."""
    above = [int(value) + zero_of(form) for value in form.values]
    if above == list(range(len(above))):
        return codes
    name, kind = ("avx512.pshuf.b.512", CODES) if IS_WIDE else ("avx2.pshuf.b", HALF)
    n = kind.count
    table = ir.Constant(kind, above * (n // WIDTH))
    parts = [lanes_of(builder, codes, list(range(i, i + n))) for i in range(0, CODES.count, n)]
    return joined(builder, [call_intrinsic(builder, f"llvm.x86.{name}", kind, table, part) for part in parts])


def joined(builder: Emitter, parts: list[Value]) -> Value:
    """One vector, or two halves of one."""
    if len(parts) == 1:
        return parts[0]
    lanes = list(range(2 * parts[0].type.count))
    return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))


def _inputs(builder: Emitter, x: Value, step: int, row: Row) -> list[Value]:
    """The higher bytes of four inputs in all lanes, and the lower. x: bytes [n_rows, 2, 32]."""
    at = row.index * 2 * CHUNK + step * 4
    words = (load_at(builder, INT, x, place) for place in (at, at + CHUNK))
    return [spread(builder, word, INTS) for word in words]


def _add(builder: Emitter, total: list[Value], inputs: list[Value], values: list[Value]) -> list[Value]:
    """Products of the higher bytes added to one sum, those of the lower to another."""
    return [dot(builder, one, values[0], x) for one, x in zip(total, inputs, strict=True)]


def dot(builder: Emitter, total: Value, codes: Value, x: Value) -> Value:
    """The sum of 16 outputs and four products each, of unsigned bytes and signed ones."""
    width = 512 if IS_WIDE else 256
    n = width // 32
    parts = []
    for i in range(0, WIDTH, n):
        of = [
            lanes_of(builder, one, list(range(i * k, (i + n) * k)))
            for one, k in ((total, 1), (codes, 4), (builder.bitcast(x, CODES), 4))
        ]
        parts.append(call_intrinsic(builder, f"llvm.x86.avx512.vpdpbusd.{width}", of[0].type, *of))
    return joined(builder, parts)


def _floats(builder: Emitter, form: BlockFormat, total: list[Value], fields: Fields) -> Value:
    return floats_of(builder, form, _whole(builder, total), fields)


def floats_of(builder: Emitter, form: BlockFormat, whole: Value, fields: Fields) -> Value:
    """unit * (whole - zero * inputs), of the sum of a group's codes times units."""
    if zero_of(form):
        inputs = spread(
            builder, load_at(builder, INT, fields.address, fields.offset(SUMS + fields.which)), INTS
        )
        whole = builder.sub(whole, builder.mul(inputs, constant(zero_of(form))))
    return in_units(builder, whole, fields)


def _whole(builder: Emitter, total: list[Value]) -> Value:
    """256 * high + low."""
    high, low = total
    return builder.add(builder.shl(high, constant(8)), low)


def in_units(builder: Emitter, whole: Value, fields: Fields) -> Value:
    unit = load_at(builder, FLOAT, fields.address, fields.offset(UNIT))
    return builder.fmul(builder.sitofp(whole, FLOATS), spread(builder, unit, FLOATS))


def _signed(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[list[Value]]:
    """What codes stand for, as `codes_of` finds it, in signed bytes."""
    zero = ir.Constant(CODES, [zero_of(form)] * CODES.count)
    for codes in codes_of(builder, form, words):
        yield [builder.sub(codes[0], zero) if zero_of(form) else codes[0]]


def _pairs(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[list[Value]]:
    """What codes stand for as pairs of bfloat16: of four neighbouring inputs the first and third, then the others.

    A pair's codes are the lower bytes of a word's halves, or the higher.
    """
    for codes in _stored(builder, form, words):
        two = builder.bitcast(codes, PAIRS)
        for code in (two, builder.lshr(two, shorts([8] * 2 * WIDTH))):
            yield [builder.bitcast(_bfloats(builder, form.values, code), BFLOATS)]


def _bfloats(builder: Emitter, values: tuple[float, ...], code: Value) -> Value:
    """The bfloat16 that each word's lowest five or six bits stand for."""
    table = [bfloat_bits(value) for value in values]
    if len(table) == 64:
        name = "llvm.x86.avx512.vpermi2var.hi.512"
        return call_intrinsic(builder, name, PAIRS, shorts(table[:32]), code, shorts(table[32:]))
    repeated = shorts(table * (32 // len(table)))  # bits of the next codes may stand above this one's
    return call_intrinsic(builder, "llvm.x86.avx512.permvar.hi.512", PAIRS, repeated, code)


def _floats_of_signed(builder: Emitter, form: BlockFormat, total: list[Value], fields: Fields) -> Value:
    """The same of numbers that are their own."""
    return in_units(builder, _whole(builder, total), fields)


def largest_of(builder: Emitter, source: Value) -> Value:
    """Bits of the largest of 32 bfloat16, without its sign, as an integer."""
    bits = [load_at(builder, SHORTS, source, 2 * WIDTH * i) for i in range(2)]
    sizes = [builder.and_(one, ir.Constant(SHORTS, [0x7FFF] * WIDTH)) for one in bits]
    larger = builder.select(builder.icmp_unsigned(">", *sizes), *sizes)
    return builder.zext(call_intrinsic(builder, "llvm.vector.reduce.umax.v16i16", SHORT, larger), INT)


@emits(types.void)
def find_unit(builder: Emitter, source: Value, fields: Value) -> None:
    """Write the unit of 32 bfloat16 to the fields, (address, n_rows): [.., n_rows] words.

    What is infinite or no number has a unit that is no number.
    """
    most = largest_of(builder, source)
    # Of the next number, so that what rounds to a power of two has it, and no byte is above 127.
    exponent = builder.lshr(builder.add(most, INT(1)), INT(7))
    least = INT(LEAST_EXPONENT)
    exponent = builder.select(builder.icmp_unsigned(">", exponent, least), exponent, least)
    unit = builder.shl(builder.sub(exponent, INT(HIGHEST)), INT(23))
    unit = builder.select(builder.icmp_unsigned("<", most, INT(0x7F80)), unit, INT(0x7FC00000))
    builder.store(builder.bitcast(unit, FLOAT), field_of(builder, fields, UNIT))


def field_of(builder: Emitter, fields: Value, field: int) -> Value:
    """Where a field is. fields: as of `find_unit`."""
    address, n_rows = (builder.extract_value(fields, i) for i in range(2))
    return builder.gep(builder.inttoptr(address, FLOAT.as_pointer()), [builder.mul(n_rows, LONG(field))])


def _unit(builder: Emitter, fields: Value) -> tuple[Value, Value]:
    """The unit, and how many of it are 1, which is exact, in all lanes."""
    unit = builder.load(field_of(builder, fields, UNIT))
    return unit, spread(builder, builder.fdiv(ir.Constant(FLOAT, 1.0), unit), FLOATS)


@emits(types.void)
def lay_inputs(builder: Emitter, source: Value, target: Value, fields: Value) -> None:
    """Make bytes [2, 32] of 32 bfloat16, and write their sums to the fields, which have the unit."""
    _, units = _unit(builder, fields)
    for i, whole in enumerate(whole_numbers(builder, source, units, fields)):
        _lay_whole(builder, whole, target, i)


def whole_numbers(builder: Emitter, source: Value, units: Value, fields: Value) -> list[Value]:
    """32 bfloat16 in units, twice 16 integers; their sums are written to the fields. units: how many are 1."""
    near = [_nearest(builder, load_at(builder, SHORTS, source, 2 * WIDTH * i), units) for i in range(2)]
    magic = builder.bitcast(all_of(_MAGIC), INTS)
    wholes = [builder.sub(builder.bitcast(one, INTS), magic) for one in near]
    sums = [call_intrinsic(builder, "llvm.vector.reduce.add.v16i32", INT, one) for one in wholes]
    for field, word in enumerate([builder.add(*sums), *sums], SUMS):
        builder.store(builder.bitcast(word, FLOAT), field_of(builder, fields, field))
    return wholes


def _lay_whole(builder: Emitter, whole: Value, target: Value, half: int) -> None:
    """Store 16 of the 32 integers: their higher bytes and their lower ones, or all as they are (`code_shorts.py`)."""
    if HAS_VNNI:
        high = builder.ashr(builder.add(whole, constant(128)), constant(8))
        store_bytes(builder, high, target, half * WIDTH)
        store_bytes(builder, whole, target, CHUNK + half * WIDTH)
    else:
        store_shorts(builder, whole, target, half * 2 * WIDTH)


def store_bytes(builder: Emitter, whole: Value, target: Value, offset: int) -> None:
    """The lowest bytes of 16 integers."""
    place = builder.inttoptr(builder.add(target, LONG(offset)), BYTES.as_pointer())
    builder.store(builder.trunc(whole, BYTES), place, align=1)


def store_shorts(builder: Emitter, whole: Value, target: Value, offset: int) -> None:
    """The lower halves of 16 integers, in the order in which pairs of them are multiplied."""
    place = builder.inttoptr(builder.add(target, LONG(offset)), SHORTS.as_pointer())
    builder.store(lanes_of(builder, builder.trunc(whole, SHORTS), _IN_PAIRS), place, align=1)


@emits(types.void)
def round_inputs(builder: Emitter, source: Value, target: Value, fields: Value) -> None:
    """Round 32 bfloat16 to whole units: bfloat16 again, which has room for these.

    They are written in the order in which `_pairs` has their weights. fields: those that have the unit.
    """
    unit, units = _unit(builder, fields)
    for i in range(2):
        near = _nearest(builder, load_at(builder, SHORTS, source, 2 * WIDTH * i), units)
        rounded = builder.fmul(builder.fsub(near, all_of(_MAGIC)), spread(builder, unit, FLOATS))
        bits = builder.lshr(builder.bitcast(rounded, INTS), constant(16))
        store_shorts(builder, bits, target, 2 * WIDTH * i)


def _nearest(builder: Emitter, bits: Value, units: Value) -> Value:
    """_MAGIC more than the nearest whole number of units. bits: of 16 bfloat16; units: how many are 1."""
    x = builder.bitcast(builder.shl(builder.zext(bits, INTS), constant(16)), FLOATS)
    return call_intrinsic(builder, "llvm.fma.v16f32", FLOATS, x, units, all_of(_MAGIC))


def _rounded(builder: Emitter, x: Value, step: int, row: Row) -> list[Value]:
    """Two inputs in all lanes. x: whole units [n_rows, 32]."""
    two = load_at(builder, INT, x, row.index * 2 * CHUNK + step * 4)
    return [builder.bitcast(spread(builder, two, INTS), BFLOATS)]


_COLUMNS = {8: 1, 4: 2, 1: 4} if IS_WIDE else {4: 1, 1: 1}


def _at_once(form: BlockFormat, n_rows: int) -> tuple[int, int]:
    """All outputs of two rows where a code is a byte, free to be read again: so memory is read in its order."""
    return (2, 4) if IS_WIDE and form.bits == 8 and n_rows > 1 else (n_rows, _COLUMNS[n_rows])


WAY = Way(4, [CODES], codes_of, _inputs, [constant(0)] * 2, _add, _floats, _at_once)
# Of AMX's tiles: of bytes, which may be signed for weights, too.
SIGNED = replace(WAY, codes=_signed, floats=_floats_of_signed)
# Of whole units in bfloat16, whose sums are float32.
UNITS = replace(code_pairs.WAY, codes=_pairs, inputs=_rounded)


def is_exact_in_units(form: BlockFormat) -> bool:
    """Whether sums of a group are below 2^24 units, so that float32 holds them, and what they are sums of."""
    most = max(abs(value) for value in form.values)
    return has_whole_numbers(form) and most * form.group * 2.0 ** (HIGHEST + 1) <= 2**24
