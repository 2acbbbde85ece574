"""The innermost part of products with packed blocks, as LLVM instructions: 32 inputs of some rows and 64 outputs.

What is emitted for a tile has no branches and no loops: codes become integers (`code_bytes.py`), pairs of bfloat16
(`code_pairs.py`) or float32 (`code_floats.py`), each is used for all rows of the tile, and the sums of a
group are scaled once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from slipstream.kernels.compiled import emit_fetch_once
from slipstream.kernels.cpu_features import is_amd
from slipstream.kernels.matmul import code_pairs
from slipstream.kernels.matmul.emit import (
    FLOAT,
    LINE,
    LONG,
    N_FIELDS,
    PANEL,
    Emitter,
    Fields,
    Row,
    Value,
    Way,
    after,
    all_of,
    load_at,
    spread,
)
from slipstream.kernels.matmul.formats import (
    CHUNK,
    EXPONENT,
    HALF,
    SIGNED,
    UNSIGNED,
    ZERO,
    BlockFormat,
)
from slipstream.kernels.matmul.formats import FLOAT as FLOAT_SCALE
from slipstream.kernels.vector import BYTES, FLOATS, INTS, IS_WIDE, WIDTH, call_intrinsic, constant

MOST_ROWS = 8 if IS_WIDE else 4  # of a tile
LAYS = not IS_WIDE or code_pairs.IS_QUICK  # what codes stand for is laid down for more than a tile of rows


class Place(NamedTuple):
    """Where a tile finds its operands: addresses, as values of LLVM."""

    x: Value  # inputs of a chunk's rows, as `Way.inputs` reads them
    sums: Value  # words, [N_FIELDS, n_rows]: what is known of a chunk's inputs (`narrow_sums.py`)
    record: Value
    chunk: Value  # which 32 inputs of the record
    first: Value  # of the panel's outputs
    totals: Value  # float32, [n_rows, 64]
    partial: Value  # float32, [8, 64]: of blocks of several groups, sums that bytes alone have scaled


class Tile(NamedTuple):
    """What is computed at once."""

    form: BlockFormat
    n_rows: int
    at_once: int  # rows; codes are read again for the next
    n_columns: int  # vectors of 16 outputs
    way: Way


def _bytes_as_floats(builder: Emitter, address: Value, *, signed: bool) -> Value:
    codes = load_at(builder, BYTES, address)
    return builder.sitofp(builder.sext(codes, INTS) if signed else builder.zext(codes, INTS), FLOATS)


def _halves(builder: Emitter, address: Value) -> Value:
    return builder.fpext(load_at(builder, ir.VectorType(ir.HalfType(), WIDTH), address), FLOATS)


def _block_scales(builder: Emitter, form: BlockFormat, record: Value, column: int) -> Value:
    """The blocks' own scales of 16 outputs."""
    address = builder.add(record, LONG(form.scale_bytes * WIDTH * column))
    return load_at(builder, FLOATS, address) if form.scale == FLOAT_SCALE else _halves(builder, address)


def _scale(builder: Emitter, form: BlockFormat, halves: Value, factors: Value) -> Value | None:
    """What the sums of 16 outputs are multiplied with: the group's bytes as numbers, or the halves if it has none.

    None where the sum of the block's groups is scaled alone. halves and factors: addresses.
    """
    if form.factor == EXPONENT:
        exponents = builder.shl(builder.zext(load_at(builder, BYTES, factors), INTS), constant(23))
        return builder.fmul(builder.bitcast(exponents, FLOATS), ir.Constant(FLOATS, [0.5] * WIDTH))
    if form.factor:
        return _bytes_as_floats(builder, factors, signed=form.factor == SIGNED)
    return None if form.is_nested else _halves(builder, halves)


def address_of(builder: Emitter, start: Value, offset: int, *strides: tuple[Value, int]) -> Value:
    """start + offset + the sum of index * bytes."""
    address = builder.add(start, LONG(offset))
    for index, n_bytes in strides:
        address = builder.add(address, builder.mul(index, LONG(n_bytes)))
    return address


def _fetching(
    builder: Emitter, tile: Tile, at: Place, codes: Iterator[list[Value]], row: int
) -> Iterator[list[Value]]:
    """The codes; at every step, a share of the lines is brought nearer that are needed next.

    row: the first of those taken at once.

    A part of a panel has as large a part of the lines. They wait for what a step has unpacked: without such a mark
    compilers fetch all at once, and memory is in a rush or idle. One row of codes that are bytes, four inputs a step,
    reads memory in its order, which AMD's wide CPUs follow sooner by themselves.
    """
    n_bytes = tile.form.record_bytes * CHUNK // tile.form.block
    start = address_of(
        builder, at.record, tile.way.ahead, (at.chunk, n_bytes), (at.first, 4 // tile.n_columns)
    )
    offsets = range(0, 0 if _is_followed(tile) else n_bytes, LINE * 4 // tile.n_columns)
    n_steps = CHUNK // tile.way.n_inputs
    done, n_steps = row // tile.at_once * n_steps, tile.n_rows // tile.at_once * n_steps
    for step, values in enumerate(codes, done):
        lines = offsets[step * len(offsets) // n_steps : (step + 1) * len(offsets) // n_steps]
        if len(lines) > 0:
            start = after(builder, start, values[0])
        for offset in lines:
            emit_fetch_once(builder, builder.add(start, LONG(offset)))
        yield values


def _is_followed(tile: Tile) -> bool:
    """Whether the CPU notices by itself what a tile reads next."""
    return (
        IS_WIDE
        and is_amd()
        and tile.form.bits == 8
        and tile.way.n_inputs == 4
        and tile.n_rows <= tile.way.n_followed
    )


def emit_tile(builder: Emitter, tile: Tile, at: Place) -> None:
    """Add the products of 32 inputs to the totals of a tile."""
    for row in range(0, tile.n_rows, tile.at_once):
        columns = [_fetching(builder, tile, at, _codes(builder, tile, at, 0), row)]
        columns += [_codes(builder, tile, at, i) for i in range(1, tile.n_columns)]
        _emit_products(builder, tile, at, (row, columns))


def emit_laid(builder: Emitter, tile: Tile, at: Place, values: Value) -> None:
    """The same where what codes stand for has been laid down at that address (`emit_values`)."""
    for row in range(0, tile.n_rows, tile.at_once):
        columns = [
            _laid(builder, tile, address_of(builder, values, LINE * i, (at.first, 4)))
            for i in range(tile.n_columns)
        ]
        _emit_products(builder, tile, at, (row, columns))


def _codes(builder: Emitter, tile: Tile, at: Place, column: int) -> Iterator[list[Value]]:
    """What the codes of 16 outputs stand for, step by step."""
    form = tile.form
    strides = (at.chunk, PANEL * CHUNK * form.bits // 8), (at.first, 4)
    words = address_of(builder, at.record, form.codes + LINE * column, *strides)
    return tile.way.codes(builder, form, words)


def _laid(builder: Emitter, tile: Tile, address: Value) -> Iterator[list[Value]]:
    """The same from memory."""
    kinds = tile.way.kinds
    for step in range(0, CHUNK // tile.way.n_inputs * len(kinds), len(kinds)):
        yield [load_at(builder, kind, address, (step + i) * PANEL * 4) for i, kind in enumerate(kinds)]


def _emit_products(
    builder: Emitter, tile: Tile, at: Place, given: tuple[int, list[Iterator[list[Value]]]]
) -> None:
    """given: the first of the rows taken at once, and of 16 outputs each, what their codes stand for."""
    first, columns = given
    rows = range(first, first + tile.at_once)
    form = tile.form
    n_groups = CHUNK // form.group
    n_steps = form.group // tile.way.n_inputs
    for group in range(n_groups):
        sums = {row: [tile.way.zeros] * tile.n_columns for row in rows}
        for step in range(group * n_steps, (group + 1) * n_steps):
            weights = [next(column) for column in columns]
            for row in rows:
                inputs = tile.way.inputs(builder, at.x, step, Row(row, tile.n_rows))
                for i, weight in enumerate(weights):
                    sums[row][i] = tile.way.add(builder, sums[row][i], inputs, weight)
        place = builder.add(builder.mul(at.chunk, LONG(n_groups)), LONG(group))
        _emit_scaling(builder, tile, at, (place, group, sums))


def _emit_scaling(builder: Emitter, tile: Tile, at: Place, done: Any) -> None:
    """Add scale * sums, and a half's minimum * sum of inputs. done: (group of the record, of the chunk, rows' sums)."""
    place, group, sums = done
    form = tile.form
    halves = address_of(builder, at.record, 0, (at.first, 2))
    factors = address_of(builder, at.record, form.factors, (at.first, 1), (place, PANEL))
    scaled = address_of(builder, at.partial if form.is_nested else at.totals, 0, (at.first, 4))
    for i in range(tile.n_columns):
        scale = _scale(builder, form, builder.add(halves, LONG(32 * i)), builder.add(factors, LONG(16 * i)))
        minimum = None
        if form.minimum == HALF:
            minimum = _halves(builder, builder.add(halves, LONG(form.second + 32 * i)))
        for row in sums:
            target = builder.add(scaled, LONG((row * PANEL + i * WIDTH) * 4))
            total = tile.way.floats(builder, form, sums[row][i], _fields(builder, tile, at, row, group))
            if scale is None:
                _store(builder, builder.fadd(load_at(builder, FLOATS, target), total), target)
            else:
                _accumulate(builder, target, scale, total)
            if minimum is not None:
                _accumulate(builder, target, minimum, _sum_of_inputs(builder, tile, at, row, group))


def _fields(builder: Emitter, tile: Tile, at: Place, row: int, group: int) -> Fields:
    """Those of a group, which is counted from the chunk on."""
    n_groups = CHUNK // tile.form.group
    chunk, which = divmod(group, n_groups)
    address = builder.add(at.sums, LONG(chunk * 4 * N_FIELDS * tile.n_rows))
    return Fields(address, Row(row, tile.n_rows), 0 if n_groups == 1 else 1 + which)


def _sum_of_inputs(builder: Emitter, tile: Tile, at: Place, row: int, group: int) -> Value:
    """In all lanes the sum of a group of a row's inputs; groups are counted from the chunk on."""
    fields = _fields(builder, tile, at, row, group)
    return spread(builder, load_at(builder, FLOAT, fields.address, fields.offset(fields.which)), FLOATS)


def _accumulate(builder: Emitter, address: Value, a: Value, b: Value) -> None:
    """The floats at the address += a * b."""
    total = call_intrinsic(builder, "llvm.fma.v16f32", FLOATS, a, b, load_at(builder, FLOATS, address))
    _store(builder, total, address)


def _store(builder: Emitter, value: Value, address: Value) -> None:
    builder.store(value, builder.inttoptr(address, FLOATS.as_pointer()), align=4)


def emit_values(builder: Emitter, tile: Tile, at: Place, target: Value) -> None:
    """Lay down what the codes of 32 inputs and 64 outputs stand for: [steps, vectors of a step, 64 outputs]."""
    columns = [_codes(builder, tile, at, i) for i in range(tile.n_columns)]
    n_kinds = len(tile.way.kinds)
    for step in range(CHUNK // tile.way.n_inputs):
        for i, column in enumerate(columns):
            for j, values in enumerate(next(column)):
                place = builder.add(target, LONG(((step * n_kinds + j) * tile.n_columns + i) * LINE))
                builder.store(values, builder.inttoptr(place, values.type.as_pointer()), align=LINE)


def emit_group(builder: Emitter, tile: Tile, at: Place, where: tuple[int, Value]) -> None:
    """What `emit_tile` does with the sums of a group, which lie in memory, [rows, 64].

    where: (the group, of the chunk, and the address of its sums); a row's sums are as many rows as a sum has vectors.
    """
    group, found = where
    sums = {}
    for row in range(tile.n_rows):
        zeros = tile.way.zeros
        places = [
            address_of(builder, found, (row * len(zeros) + k) * LINE * 4, (at.first, 4))
            for k in range(len(zeros))
        ]
        sums[row] = [[load_at(builder, zero.type, one) for zero, one in zip(zeros, places, strict=True)]]
    n_groups = CHUNK // tile.form.group
    place = builder.add(builder.mul(at.chunk, LONG(n_groups)), LONG(group))
    _emit_scaling(builder, tile, at, (place, group, sums))


def emit_end(builder: Emitter, tile: Tile, at: Place) -> None:
    """Add a block's partial sums, times its scales, to the totals of 64 outputs; they begin anew at zero.

    Before that the zeros times the sum of inputs are subtracted from the partial sums, or behind it the second halves
    times the sum over groups of their second bytes * sum of inputs from the totals.
    """
    zero = all_of(0.0)
    for i in range(PANEL // WIDTH):
        scales = _block_scales(builder, tile.form, at.record, i)
        zeros = _zeros(builder, tile.form, at, i)
        for row in range(tile.n_rows):
            offset = LONG((row * PANEL + i * WIDTH) * 4)
            partial = builder.add(at.partial, offset)
            sums = load_at(builder, FLOATS, partial)
            if zeros is not None:
                inputs = _sum_of_block(builder, tile, at, row)
                sums = call_intrinsic(builder, "llvm.fma.v16f32", FLOATS, zeros, inputs, sums)
            _accumulate(builder, builder.add(at.totals, offset), scales, sums)
            _store(builder, zero, partial)
        if tile.form.minimum == UNSIGNED:
            _emit_minima(builder, tile, at, i)


def _zeros(builder: Emitter, form: BlockFormat, at: Place, column: int) -> Value | None:
    """Minus the zeros of 16 outputs, if the blocks have any."""
    if form.minimum != ZERO:
        return None
    place = builder.add(at.record, LONG(form.second_factors + WIDTH * column))
    return builder.fneg(_bytes_as_floats(builder, place, signed=False))


def _sum_of_block(builder: Emitter, tile: Tile, at: Place, row: int) -> Value:
    """In all lanes the sum of a row's inputs to a block: that of its groups, from the first on."""
    sums = [_sum_of_inputs(builder, tile, at, row, group) for group in range(tile.form.n_groups)]
    return functools.reduce(builder.fadd, sums)


def _emit_minima(builder: Emitter, tile: Tile, at: Place, column: int) -> None:
    """What `emit_end` subtracts, of 16 outputs."""
    form = tile.form
    sums = [all_of(0.0)] * tile.n_rows
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
