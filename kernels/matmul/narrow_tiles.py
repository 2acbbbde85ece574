"""Products with parts in records in the tiles of AMX: what `narrow_sums.py` does, 16 rows at a time.

What the codes of 32 inputs and 64 outputs stand for is laid down once, as a panel of plain weights is, and multiplied
with all rows; the sums of a group wait in memory until vectors have scaled them as they do without tiles. So that all
parts of the CPU are busy, a chunk of 32 inputs is laid down while the one before is multiplied, and the sums of the one
before that are scaled.

Values are of bfloat16 or bytes. Numbers of few bits are multiplied in bfloat16 with rows in whole units
(`code_bytes.py`): while a group's sum is below 2^24 units it is exact, that of the bytes. Where it is not, a row is two
of a tile, the higher bytes of its inputs and the lower. As those sums are exact, it does not matter who adds them, and
few rows are left to the instruction for vectors. Of fp8 a tile adds up the inputs of a block, as `tile_sums.py` says.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from slipstream.kernels import threads
from slipstream.kernels.amx import (
    configure,
    multiply,
    multiply_signed,
    release,
    store,
    zero,
)
from slipstream.kernels.compiled import inlined, long_pointer
from slipstream.kernels.matmul.arrange import FIELD_BYTES, N_IN, N_ROWS, ROUNDED, SUMS, TILES, X, tile_rows
from slipstream.kernels.matmul.block_steps import group_of, laid_bytes, lay_chunk, scale_group
from slipstream.kernels.matmul.formats import (
    CHUNK,
    OF_A8,
    OF_A8_SIGNED,
    OF_BYTES,
    OF_SIGNED,
    OF_TILES,
    OF_UNITS,
    PANEL,
)
from slipstream.kernels.matmul.narrow_sums import (
    FOUND,
    PARTIAL,
    RECORDS,
    TOTALS,
    VALUES,
    add_blocks,
    end_chunk,
    part_of,
    share_of,
)
from slipstream.kernels.matmul.records import constants_of
from slipstream.kernels.matmul.tile_sums import (
    LINE,
    STEP_BYTES,
    TILE_ROWS,
    VECTOR_ROWS,
    add_first_half,
    add_other_half,
    add_products,
    store_sums,
)
from slipstream.kernels.vector import WIDTH

SUMS_BYTES = TILE_ROWS * STEP_BYTES  # of a product of tiles
ROW_BYTES = CHUNK * 2  # of a row's inputs to a chunk


# What products of a part are of -> the same of few rows, which are left to vectors; "": none are.
WAYS = {OF_TILES: "", OF_UNITS: OF_BYTES, OF_BYTES: OF_BYTES, OF_A8: OF_A8}


@functools.cache
def block_task(kind: str, way: str) -> int:
    """Address of what adds one panel's products with blocks of that type; way: one of WAYS.

    Of fp8 inputs are as they are; numbers that are multiplied in bytes have groups of 32 inputs.
    """
    of_few = WAYS[way]

    def items(address: int) -> None:
        a = long_pointer(address)
        if way == OF_TILES:
            _add_blocks(a, (kind, OF_TILES, _do_joined, 1, 8), (CHUNK, 1))
        elif a[N_ROWS] <= VECTOR_ROWS:
            add_blocks(a, kind, of_few, VECTOR_ROWS)
        elif way == OF_UNITS:
            _add_blocks(a, (kind, OF_UNITS, _do_units, 1, 4), (group_of(kind), 8))
        elif way == OF_BYTES:
            _add_blocks(a, (kind, OF_SIGNED, _do_bytes, 2, 8), (CHUNK // 2, 8))
        else:
            _add_blocks(a, (kind, OF_A8_SIGNED, _do_a8, 1, 8), (group_of(kind) // 2, 8))

    return threads.compile_task(items)


@inlined
def _add_blocks(a: Any, form: Any, shape: Any) -> None:
    """Add the products of 64 outputs to the totals. a: the arguments.

    form: (kind, way, what does a chunk, a row's lines of a tile, how many chunks' values are kept for other rows if a
    block has no more: not so many that they fill the first cache). shape: (depth of a tile of inputs, as bfloat16, and
    of how many rows a multiple may be read).
    """
    n_rows, n_chunks = a[N_ROWS], a[N_IN] // CHUNK
    most = min((max(n_rows, 1) + shape[1] - 1) // shape[1] * shape[1], TILE_ROWS)
    configure(min(most * form[3], TILE_ROWS), np.int64(shape[0]))
    visit = _n_laid(n_rows, form) if n_rows > TILE_ROWS else max(n_chunks, 1)
    for begin in range(0, n_chunks, visit):
        span = begin, min(begin + visit, n_chunks)
        for first in range(0, n_rows, TILE_ROWS):
            # Where no row behind the last may be read, rows before `first` are multiplied once more, and left.
            start = min(first, n_rows - most) if shape[1] == 1 else first
            _add_rows(a, (start, first, min(first + TILE_ROWS, n_rows)), span, form)
    release()


@inlined
def _n_laid(n_rows: int, form: Any) -> Any:
    """Chunks of which values are kept, a power of two: whole blocks for other rows, and two where there are none."""
    return max(constants_of(form[0])[1] // CHUNK, form[4]) if n_rows > TILE_ROWS else 2


@inlined
def _add_rows(a: Any, rows: Any, span: Any, form: Any) -> None:
    """Some chunks of up to 16 rows; the first of all lay down what codes stand for.

    What is stored cannot be loaded at once, neither values into tiles nor sums out of them, so each step does these for
    other chunks. rows: (the tile's first, the first that is added, behind the last).
    """
    kind, way, do_chunk, _, _ = form
    fetch, last = share_of(a, rows[1], TILE_ROWS, kind), _n_laid(a[N_ROWS], form) - 1
    for step in range(span[0], span[1] + 3):
        if rows[1] == 0 and step < span[1]:
            values = a[VALUES] + (step & last) * laid_bytes(way)
            lay_chunk((0, 0, a[RECORDS], step, 0, 0, 0, values), (kind, way))
        if step > span[0]:
            values = a[VALUES] + (step - 1 & last) * laid_bytes(way)
            do_chunk(a, (rows, step - 1, span), (values, fetch), form)


@inlined
def _do_joined(a: Any, at: Any, weights: Any, form: Any) -> None:
    """Multiply a chunk, and scale the sums of a block that the chunk before has ended.

    at: (rows as of `_add_rows`, chunk, (the first chunk, behind the last)). weights: (address of what is laid down, of
    `share_of`).
    """
    (rows, chunk, span), (values, fetch), per_block = at, weights, constants_of(form[0])[1] // CHUNK
    if span[0] < chunk <= span[1] and chunk % per_block == 0:
        _scale_rows(a, rows, (chunk - 1, a[FOUND]), form)
    if chunk < span[1]:
        if chunk % per_block == 0:
            zero(0)
            zero(1)
            zero(2)
            zero(3)
        n_bytes = a[N_IN] * 2
        x = a[X] + rows[0] * n_bytes + chunk * ROW_BYTES
        add_products(x, n_bytes, values, part_of(fetch, a[RECORDS], (chunk, 0, 1)))
        if (chunk + 1) % per_block == 0:
            store_sums(a[FOUND])


@inlined
def _do_units(a: Any, at: Any, weights: Any, form: Any) -> None:
    """Multiply a chunk, group by group, and scale sums of earlier ones. at, weights: as of `_do_joined`."""
    _do_groups(a, at, weights, (form, 2, multiply))


@inlined
def _do_a8(a: Any, at: Any, weights: Any, form: Any) -> None:
    """The same of inputs of eight bits."""
    _do_groups(a, at, weights, (form, 1, multiply_signed))


@inlined
def _do_groups(a: Any, at: Any, weights: Any, which: Any) -> None:
    """which: (form, bytes of an input, what multiplies tiles)."""
    (rows, chunk, _), (values, fetch), (form, n_bytes, multiply_tiles) = at, weights, which
    line, size = CHUNK * n_bytes, group_of(form[0])
    x = a[ROUNDED] + (rows[0] * (a[N_IN] // CHUNK) + chunk * TILE_ROWS) * line
    if size == CHUNK:
        _do_product(a, at, (x, line, values, fetch, multiply_tiles), (form, rows, (0, 1), (0, 1)))
    else:
        _do_product(a, at, (x, line, values, fetch, multiply_tiles), (form, rows, (0, 2), (0, 0)))
        x, values = x + size * n_bytes, values + size * n_bytes // 4 * STEP_BYTES
        _do_product(a, at, (x, line, values, fetch, multiply_tiles), (form, rows, (1, 2), (1, 1)))


@inlined
def _do_bytes(a: Any, at: Any, weights: Any, form: Any) -> None:
    """The same of groups of 32 inputs, for up to eight rows, then for the others."""
    (rows, chunk, _), (values, fetch) = at, weights
    n_chunks, (start, first, end) = a[N_IN] // CHUNK, rows
    x = a[TILES] + (first * n_chunks + chunk * 8) * ROW_BYTES
    if end - first <= 8:
        _do_product(a, at, (x, CHUNK, values, fetch, multiply_signed), (form, rows, (0, 1), (0, 1)))
    else:
        which = form, (start, first, first + 8), (0, 2), (0, 1)
        _do_product(a, at, (x, CHUNK, values, fetch, multiply_signed), which)
        x, which = x + 8 * n_chunks * ROW_BYTES, (form, (first + 8, first + 8, end), (1, 2), (0, 1))
        _do_product(a, at, (x, CHUNK, values, fetch, multiply_signed), which)


@inlined
def _do_product(a: Any, at: Any, operands: Any, which: Any) -> None:
    """A product; meanwhile the sums of the last but one are scaled, so that all parts of the CPU are busy.

    Half of its sums are stored in their place, the other half are left to the next product.
    operands: (address of inputs, from a line to the next, address of weights, of `share_of`, what multiplies tiles).
    which: (form, rows, (the product, how many a chunk has: 1 or 2), of `_scale`: (group, whether it is the last)).
    """
    (_, chunk, span), (x, line_bytes, weights, fetch, multiply_tiles) = at, operands
    (form, rows, (i, n), group), ahead = which, part_of(fetch, a[RECORDS], (chunk, which[2][0], which[2][1]))
    old, place = (chunk - 2, chunk % 2) if n == 1 else (chunk - 1, np.int64(i))
    sums, before = a[FOUND] + place * SUMS_BYTES, a[FOUND] + (1 - place) * SUMS_BYTES
    if chunk < span[1]:
        zero(0)
        zero(1)
        add_first_half(x, np.int64(line_bytes), weights, (ahead, multiply_tiles))
    if span[0] <= old < span[1]:
        _scale_half(a, rows, (old, sums), (form, 0, group))
    if chunk < span[1] + (i == 0):
        store(2, before + 2 * LINE, STEP_BYTES)
        store(3, before + 3 * LINE, STEP_BYTES)
    if chunk < span[1]:
        zero(2)
        zero(3)
        add_other_half(weights, (ahead, multiply_tiles))
    if span[0] <= old < span[1]:
        _scale_half(a, rows, (old, sums), (form, PANEL // 2, group))
    if chunk < span[1]:
        store(0, sums, STEP_BYTES)
        store(1, sums + LINE, STEP_BYTES)


@inlined
def _scale_half(a: Any, rows: Any, done: Any, form: Any) -> None:
    """Add what sums make, scaled, to 32 of the totals. form: (of tiles, the first of these, of `_scale`)."""
    start, row, end = rows
    of_tiles, first, group = form
    while row < end:
        _scale(a, (row, row - start), done, (of_tiles, 8, (first, first + PANEL // 2), group))
        row += 8


@inlined
def _scale_rows(a: Any, rows: Any, done: Any, form: Any) -> None:
    """The same of all totals, for any number of rows. form: of tiles."""
    start, row, end = rows
    while row < end:
        n = tile_rows(a[N_ROWS] - row, a[N_ROWS] > VECTOR_ROWS)
        if n == 8:
            _scale(a, (row, row - start), done, (form, 8, (0, PANEL), (0, 1)))
        elif n == 4:
            _scale(a, (row, row - start), done, (form, 4, (0, PANEL), (0, 1)))
        else:
            _scale(a, (row, row - start), done, (form, 1, (0, PANEL), (0, 1)))
        row += n


@inlined
def _scale(a: Any, at: Any, done: Any, form: Any) -> None:
    """The same for n rows. at: the first, and which of the product's it is. done: (chunk, address of its sums).

    form: (of tiles, n, (the first output, behind the last), (group of the chunk, whether it is the last)).
    """
    (row, of_product), (chunk, sums), ((kind, way, _, n_lines, _), n, (begin, end), group) = at, done, form
    partial = a[PARTIAL] + (row & TILE_ROWS - 1) * STEP_BYTES
    fields = a[SUMS] + (row * (a[N_IN] // CHUNK) + chunk * n) * FIELD_BYTES
    for first in range(begin, end, WIDTH):
        found = sums + of_product * n_lines * STEP_BYTES
        at = 0, fields, a[RECORDS], chunk, first, a[TOTALS] + row * STEP_BYTES, partial, found
        scale_group(at, (kind, n, way, group[0]))
    if group[1] == 1 and end == PANEL:
        end_chunk(a, (row, n), chunk, kind, partial)
