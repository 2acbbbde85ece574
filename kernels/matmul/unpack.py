"""The innermost part of products with packed blocks, as LLVM instructions: 32 inputs of some rows and 64 outputs.

What is emitted for a tile has no branches and no loops: codes become pairs of bfloat16 by table lookups, each is used
for all rows of the tile, and the sums of a group are scaled once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from slipstream.kernels.compiled import emit_prefetch
from slipstream.kernels.matmul.formats import (
    CHUNK,
    EXPONENT,
    FORMATS,
    HALF,
    PANEL,
    SIGNED,
    UNSIGNED,
    BlockFormat,
)
from slipstream.kernels.vector import BFLOATS, BYTES, FLOATS, INTS, WIDTH, call_intrinsic, constant

AHEAD = 4096  # bytes between the records in use and those that are being fetched
BYTE, SHORT, INT, LONG, FLOAT = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
)
PAIRS = ir.VectorType(SHORT, 2 * WIDTH)  # bits of two bfloat16 in each lane
CODES = ir.VectorType(BYTE, 4 * WIDTH)
LINE = 64  # bytes of a line of the cache, of a vector, and of 16 outputs' words
Emitter = Any  # an ir.IRBuilder
Value = Any  # of LLVM


class Place(NamedTuple):
    """Where a tile finds its operands: addresses, as values of LLVM."""

    x: Value  # pairs of bfloat16 or float32, [steps, n_rows]
    sums: Value  # float32, [3, n_rows]: sums of the 32 inputs, of their first half and of their second
    record: Value
    chunk: Value  # which 32 inputs of the record
    first: Value  # of the panel's outputs
    totals: Value  # float32, [n_rows, 64]
    partial: Value  # float32, [8, 64]: of blocks of several groups, sums that bytes alone have scaled


class Tile(NamedTuple):
    """What is computed at once."""

    form: BlockFormat
    n_rows: int
    n_columns: int  # vectors of 16 outputs
    wide: bool  # inputs are float32


def _load(builder: Emitter, kind: Any, address: Value, offset: int = 0) -> Value:
    """A value of that type, `offset` bytes behind the address."""
    place = builder.inttoptr(builder.add(address, LONG(offset)), kind.as_pointer())
    return builder.load(place, align=1 if kind in (BYTE, BYTES, CODES) else 2)


def _spread(builder: Emitter, scalar: Value, kind: Any) -> Value:
    """The scalar in all lanes."""
    none = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(none, scalar, INT(0))
    return builder.shuffle_vector(one, none, ir.Constant(ir.VectorType(INT, kind.count), [0] * kind.count))


def _shorts(values: list[int]) -> Value:
    return ir.Constant(PAIRS, values)


def bfloat_bits(value: int) -> int:
    """Bits of a whole number of at most eight binary digits as bfloat16: it is exact."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    return bits


def pairs(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[Value]:
    """Values of 16 outputs and 32 inputs, two neighbouring inputs at a time, as pairs of bfloat16: 16 vectors.

    words: the address of their first word.
    """
    return _from_bytes(builder, words) if form.bits == 8 else _from_words(builder, form, words)


def _from_words(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[Value]:
    """Codes of up to six bits: shifted to the lowest bits of a word, above which the lookup does not read."""
    bits, loaded = form.bits, {}
    for step in range(CHUNK // 2):
        first, shift = divmod(step * bits, 16)
        last = (step * bits + bits - 1) // 16
        for i in {first, last} - loaded.keys():
            loaded[i] = _load(builder, PAIRS, words, i * PANEL * 4)
        if last > first:
            by = _shorts([shift] * 2 * WIDTH)
            code = call_intrinsic(builder, "llvm.fshr.v32i16", PAIRS, loaded[last], loaded[first], by)
        else:
            code = builder.lshr(loaded[first], _shorts([shift] * 2 * WIDTH)) if shift else loaded[first]
        yield _look_up(builder, form.values, code)


def _look_up(builder: Emitter, values: tuple[int, ...], code: Value) -> Value:
    """The bfloat16 that each word's lowest five or six bits stand for."""
    table = [bfloat_bits(value) for value in values]
    if len(table) == 64:
        name = "llvm.x86.avx512.vpermi2var.hi.512"
        return call_intrinsic(builder, name, PAIRS, _shorts(table[:32]), code, _shorts(table[32:]))
    repeated = _shorts(table * (32 // len(table)))  # bits of the next codes may stand above this one's
    return call_intrinsic(builder, "llvm.x86.avx512.permvar.hi.512", PAIRS, repeated, code)


def _from_bytes(builder: Emitter, words: Value) -> Iterator[Value]:
    """Sign and magnitude in eight bits: both bytes of the magnitude by lookup, then the sign, two steps at once."""
    table = [bfloat_bits(value) for value in range(128)]
    upper = [i + j + 64 * k for i in (0, 16, 32, 48) for j in range(8) for k in (0, 1)]
    for step in range(0, CHUNK // 2, 2):
        codes = _load(builder, CODES, words, step // 2 * PANEL * 4)
        low, high = (_byte_of(builder, [bits >> shift & 255 for bits in table], codes) for shift in (0, 8))
        sign = builder.and_(codes, ir.Constant(CODES, [128] * 4 * WIDTH))
        high = builder.or_(high, sign)
        for lanes in (upper, [lane + 8 for lane in upper]):
            mask = ir.Constant(ir.VectorType(INT, 4 * WIDTH), lanes)
            pair = builder.bitcast(builder.shuffle_vector(low, high, mask), PAIRS)
            yield pair
        words = _after(
            builder, words, pair
        )  # else compilers look all codes up at once and run out of registers


def _byte_of(builder: Emitter, table: list[int], codes: Value) -> Value:
    """The byte that the lowest seven bits of each byte stand for."""
    halves = (ir.Constant(CODES, part) for part in (table[:64], table[64:]))
    first, second = halves
    return call_intrinsic(builder, "llvm.x86.avx512.vpermi2var.qi.512", CODES, first, codes, second)


def _inputs(builder: Emitter, tile: Tile, x: Value) -> list[Value]:
    """Two inputs in all lanes: one vector of pairs of bfloat16, or two of float32. x: their address."""
    if not tile.wide:
        return [builder.bitcast(_spread(builder, _load(builder, INT, x), INTS), BFLOATS)]
    return [_spread(builder, _load(builder, FLOAT, x, 4 * i), FLOATS) for i in range(2)]


def _weights(builder: Emitter, tile: Tile, pair: Value) -> list[Value]:
    """Values for two inputs, as `_inputs`."""
    if not tile.wide:
        return [builder.bitcast(pair, BFLOATS)]
    whole = builder.bitcast(pair, INTS)
    parts = builder.shl(whole, constant(16)), builder.and_(whole, constant(-65536))
    return [builder.bitcast(part, FLOATS) for part in parts]


def _multiply(builder: Emitter, total: Value, inputs: list[Value], weights: list[Value]) -> Value:
    """total + x₀w₀ + x₁w₁."""
    if len(inputs) == 1:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call_intrinsic(builder, name, FLOATS, total, inputs[0], weights[0])
    for x, weight in zip(inputs, weights, strict=True):
        total = call_intrinsic(builder, "llvm.fma.v16f32", FLOATS, x, weight, total)
    return total


def _bytes_as_floats(builder: Emitter, address: Value, *, signed: bool) -> Value:
    codes = _load(builder, BYTES, address)
    return builder.sitofp(builder.sext(codes, INTS) if signed else builder.zext(codes, INTS), FLOATS)


def _halves(builder: Emitter, address: Value) -> Value:
    return builder.fpext(_load(builder, ir.VectorType(ir.HalfType(), WIDTH), address), FLOATS)


def _scale(builder: Emitter, form: BlockFormat, record: Value, factors: Value) -> Value:
    """What the sums of 16 outputs are multiplied with: the group's bytes as numbers, or the halves if it has none.

    record: the address of their halves; factors: that of their group's bytes.
    """
    if form.factor == EXPONENT:
        exponents = builder.shl(builder.zext(_load(builder, BYTES, factors), INTS), constant(23))
        return builder.fmul(builder.bitcast(exponents, FLOATS), ir.Constant(FLOATS, [0.5] * WIDTH))
    if form.factor:
        return _bytes_as_floats(builder, factors, signed=form.factor == SIGNED)
    return _halves(builder, record)


def _address(builder: Emitter, start: Value, offset: int, *strides: tuple[Value, int]) -> Value:
    """start + offset + the sum of index * bytes."""
    address = builder.add(start, LONG(offset))
    for index, n_bytes in strides:
        address = builder.add(address, builder.mul(index, LONG(n_bytes)))
    return address


def _after(builder: Emitter, address: Value, vector: Value) -> Value:
    """The address, which the compiler takes to depend on the vector: it moves no use of it to before that."""
    form = ir.FunctionType(LONG, [LONG, vector.type])
    return builder.asm(form, "", "=r,0,v", [address, vector], side_effect=False)


def _fetches(builder: Emitter, tile: Tile, at: Place) -> Generator[None, Value, None]:
    """At every step, start to bring a share of the lines nearer that are needed next; of half a panel, half of them.

    A step sends what it has unpacked: without such a mark compilers fetch all at once, and memory is in a rush or idle.
    """
    n_bytes = tile.form.record_bytes * CHUNK // tile.form.block
    start = _address(builder, at.record, AHEAD, (at.chunk, n_bytes), (at.first, 2))
    offsets = range(0, n_bytes, LINE * 4 // tile.n_columns)
    n_steps = CHUNK // 2
    for step in range(n_steps):
        unpacked = yield
        lines = offsets[step * len(offsets) // n_steps : (step + 1) * len(offsets) // n_steps]
        if len(lines) > 0:
            start = _after(builder, start, unpacked)
        for offset in lines:
            emit_prefetch(builder, builder.add(start, LONG(offset)))
    yield


def emit_tile(builder: Emitter, tile: Tile, at: Place) -> None:
    """Add the products of 32 inputs to the totals of a tile."""
    form = tile.form
    codes = _address(
        builder, at.record, form.codes, (at.chunk, PANEL * CHUNK * form.bits // 8), (at.first, 4)
    )
    columns = [pairs(builder, form, builder.add(codes, LONG(LINE * i))) for i in range(tile.n_columns)]
    n_groups = CHUNK // form.group
    n_steps = form.group // 2
    fetches = _fetches(builder, tile, at)
    next(fetches)
    for group in range(n_groups):
        zero = ir.Constant(FLOATS, [0.0] * WIDTH)
        sums = [[zero] * tile.n_columns for _ in range(tile.n_rows)]
        for step in range(group * n_steps, (group + 1) * n_steps):
            unpacked = [next(column) for column in columns]
            fetches.send(unpacked[0])
            weights = [_weights(builder, tile, pair) for pair in unpacked]
            for row in range(tile.n_rows):
                x = builder.add(at.x, LONG((step * tile.n_rows + row) * (8 if tile.wide else 4)))
                inputs = _inputs(builder, tile, x)
                for i, weight in enumerate(weights):
                    sums[row][i] = _multiply(builder, sums[row][i], inputs, weight)
        place = builder.add(builder.mul(at.chunk, LONG(n_groups)), LONG(group))
        _emit_scaling(builder, tile, at, (place, group, sums))


def _emit_scaling(builder: Emitter, tile: Tile, at: Place, done: Any) -> None:
    """Add scale * sums, and a half's minimum * sum of inputs. done: (group of the record, of the chunk, sums)."""
    place, group, sums = done
    form = tile.form
    halves = _address(builder, at.record, 0, (at.first, 2))
    factors = _address(builder, at.record, form.factors, (at.first, 1), (place, PANEL))
    scaled = _address(builder, at.partial if form.is_nested else at.totals, 0, (at.first, 4))
    for i in range(tile.n_columns):
        scale = _scale(builder, form, builder.add(halves, LONG(32 * i)), builder.add(factors, LONG(16 * i)))
        minimum = None
        if form.minimum == HALF:
            minimum = _halves(builder, builder.add(halves, LONG(form.second + 32 * i)))
        for row in range(tile.n_rows):
            target = builder.add(scaled, LONG((row * PANEL + i * WIDTH) * 4))
            _accumulate(builder, target, scale, sums[row][i])
            if minimum is not None:
                _accumulate(builder, target, minimum, _sum_of_inputs(builder, tile, at, row, group))


def _sum_of_inputs(builder: Emitter, tile: Tile, at: Place, row: int, group: int) -> Value:
    """In all lanes the sum of a group of a row's inputs; groups are counted from the chunk on."""
    n_groups = CHUNK // tile.form.group
    chunk, which = divmod(group, n_groups)
    which = 0 if n_groups == 1 else 1 + which
    x = _load(builder, FLOAT, at.sums, ((chunk * 3 + which) * tile.n_rows + row) * 4)
    return _spread(builder, x, FLOATS)


def _accumulate(builder: Emitter, address: Value, a: Value, b: Value) -> None:
    """The floats at the address += a * b."""
    total = call_intrinsic(builder, "llvm.fma.v16f32", FLOATS, a, b, _load(builder, FLOATS, address))
    _store(builder, total, address)


def _store(builder: Emitter, value: Value, address: Value) -> None:
    builder.store(value, builder.inttoptr(address, FLOATS.as_pointer()), align=4)


def emit_end(builder: Emitter, tile: Tile, at: Place) -> None:
    """Add a block's partial sums, times its halves, to the totals of 64 outputs; they begin anew at zero.

    Then subtract the second halves times the sum over groups of their second bytes * sum of inputs.
    """
    zero = ir.Constant(FLOATS, [0.0] * WIDTH)
    for i in range(PANEL // WIDTH):
        halves = _halves(builder, builder.add(at.record, LONG(32 * i)))
        for row in range(tile.n_rows):
            offset = LONG((row * PANEL + i * WIDTH) * 4)
            partial = builder.add(at.partial, offset)
            _accumulate(builder, builder.add(at.totals, offset), halves, _load(builder, FLOATS, partial))
            _store(builder, zero, partial)
        if tile.form.minimum == UNSIGNED:
            _emit_minima(builder, tile, at, i)


def _emit_minima(builder: Emitter, tile: Tile, at: Place, column: int) -> None:
    """What `emit_end` subtracts, of 16 outputs."""
    form = tile.form
    sums = [ir.Constant(FLOATS, [0.0] * WIDTH)] * tile.n_rows
    for group in range(form.n_groups):
        place = builder.add(at.record, LONG(form.second_factors + group * PANEL + WIDTH * column))
        factors = _bytes_as_floats(builder, place, signed=False)
        for row in range(tile.n_rows):
            x = _sum_of_inputs(builder, tile, at, row, group)
            sums[row] = call_intrinsic(builder, "llvm.fma.v16f32", FLOATS, factors, x, sums[row])
    halves = builder.fneg(_halves(builder, builder.add(at.record, LONG(form.second + 32 * column))))
    for row in range(tile.n_rows):
        target = builder.add(at.totals, LONG((row * PANEL + column * WIDTH) * 4))
        _accumulate(builder, target, halves, sums[row])


def _placed(builder: Emitter, form: BlockFormat, operands: Value) -> Place:
    """The operands of a kernel's call, with the record that its chunk is in."""
    x, sums, records, chunk, first, totals, partial = (builder.extract_value(operands, i) for i in range(7))
    n_chunks = LONG(form.block // CHUNK)
    record = _address(builder, records, 0, (builder.udiv(chunk, n_chunks), form.record_bytes))
    return Place(x, sums, record, builder.urem(chunk, n_chunks), first, totals, partial)


def _add_chunk(typing: Any, place: Any, kind: Any, n_rows: Any, wide: Any) -> Any:
    """(place: seven int64, kind, rows, 1 for float32) adds 32 inputs to the totals of some rows, or to partial sums.

    place: as of `Place`, but the first record of the panel and which 32 inputs of the row. kind, n_rows and wide are
    constants. Eight rows take 32 outputs, fewer take 64.
    """

    def generate(context: Any, builder: Emitter, signature: Any, values: Any) -> Any:
        form, rows = FORMATS[kind.literal_value], n_rows.literal_value
        tile = Tile(form, rows, 2 if rows == 8 else 4, bool(wide.literal_value))
        emit_tile(builder, tile, _placed(builder, form, values[0]))
        return context.get_dummy_value()

    return types.void(place, kind, n_rows, wide), generate


def _end_block(typing: Any, place: Any, kind: Any, n_rows: Any) -> Any:
    """(place, kind, rows) adds the partial sums of the block that the chunk is in to the totals of 64 outputs."""

    def generate(context: Any, builder: Emitter, signature: Any, values: Any) -> Any:
        form = FORMATS[kind.literal_value]
        if form.is_nested:
            tile = Tile(form, n_rows.literal_value, PANEL // WIDTH, wide=False)
            emit_end(builder, tile, _placed(builder, form, values[0]))
        return context.get_dummy_value()

    return types.void(place, kind, n_rows), generate


add_chunk: Callable[[Any, Any, Any, Any], None] = intrinsic(prefer_literal=True)(_add_chunk)
end_block: Callable[[Any, Any, Any], None] = intrinsic(prefer_literal=True)(_end_block)
