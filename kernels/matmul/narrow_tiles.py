"""Products with parts in records in the tiles of AMX for bfloat16: what `narrow_sums.py` does, 16 rows at a time.

What the codes of 32 inputs and 64 outputs stand for is laid down once, as a panel of plain weights is, and multiplied
with all rows; sums are scaled as without tiles. A tile adds up the inputs of a group, or, of fp8, those of a block, as
`tile_sums.py` says. Numbers of few bits are multiplied with rows in whole units (`code_bytes.py`): while a group's sum
is below 2^24 units, it is exact, that of the bytes, so up to eight rows are left to the instruction for those.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from slipstream.kernels import threads
from slipstream.kernels.compiled import inlined, long_pointer
from slipstream.kernels.matmul.amx import configure, release, zero
from slipstream.kernels.matmul.arrange import FIELD_BYTES, N_IN, N_ROWS, ROUNDED, SUMS, X, tile_rows
from slipstream.kernels.matmul.block_steps import group_of, lay_chunk, scale_group
from slipstream.kernels.matmul.formats import CHUNK, OF_BYTES, OF_TILES, OF_UNITS, PANEL
from slipstream.kernels.matmul.narrow_sums import (
    FOUND,
    PARTIAL,
    RECORDS,
    TOTALS,
    VALUES,
    VISIT,
    add_blocks,
    add_span,
    end_chunk,
    part_of,
    share_of,
)
from slipstream.kernels.matmul.records import constants_of
from slipstream.kernels.matmul.tile_sums import (
    MOST_ROWS,
    STEP_BYTES,
    TILE_BYTES,
    VECTOR_ROWS,
    add_products,
    store_sums,
)
from slipstream.kernels.matmul.unpack import SUM_ROWS
from slipstream.kernels.vector import WIDTH

GROUP_BYTES = SUM_ROWS * STEP_BYTES  # of a group's sums


@functools.cache
def block_task(kind: str) -> int:
    """Address of what adds one panel's products with blocks of that type; of fp8, inputs as they are."""

    def items(address: int) -> None:
        _add_blocks(long_pointer(address), (X, kind, OF_TILES, 1))

    return threads.compile_task(items)


@functools.cache
def unit_task(kind: str) -> int:
    """The same of a type whose numbers are multiplied in whole units."""

    def items(address: int) -> None:
        a = long_pointer(address)
        if a[N_ROWS] > VECTOR_ROWS:
            _add_blocks(a, (ROUNDED, kind, OF_UNITS, 0))
        else:
            add_blocks(a, kind, OF_BYTES, add_span)

    return threads.compile_task(items)


@inlined
def _add_blocks(a: Any, form: Any) -> None:
    """Add the products of 64 outputs to the totals. a: the arguments.

    form: (where in them the rows are, kind, way, 1 if a block's groups are added up before they are scaled).
    """
    n_rows, n_chunks = a[N_ROWS], a[N_IN] // CHUNK
    most = min(n_rows, MOST_ROWS)
    configure(max(most, 1), np.int64(CHUNK if form[3] else group_of(form[1])))
    visit = VISIT if n_rows > MOST_ROWS else max(n_chunks, 1)
    for begin in range(0, n_chunks, visit):
        span = begin, min(begin + visit, n_chunks)
        for first in range(0, n_rows, MOST_ROWS):
            start = min(first, n_rows - most)  # rows before `first` are multiplied once more, and left
            _add_tile(a, (first, start), span, form)
    release()


@inlined
def _add_tile(a: Any, rows: Any, span: Any, form: Any) -> None:
    """Some times 32 inputs of a tile's rows, of which those from the first on are added.

    The first tile of all lays down what codes stand for. What is stored cannot be loaded at once, neither values into
    tiles nor sums out of them, so each step does these for other inputs.
    """
    _, kind, way, joins = form
    per_block = constants_of(kind)[1] // CHUNK
    fetch = share_of(a, rows[0], MOST_ROWS, kind)
    for step in range(span[0], span[1] + 2):
        if rows[0] == 0 and step < span[1]:
            values = a[VALUES] + step % VISIT * TILE_BYTES
            lay_chunk((0, 0, a[RECORDS], step, 0, 0, 0), kind, way, values)
        chunk = step - 1
        if span[0] <= chunk < span[1]:
            _multiply_chunk(a, rows[1], chunk, (form, fetch))
        chunk = step - 2
        if chunk >= span[0] and (joins == 0 or (chunk + 1) % per_block == 0):
            _scale_tile(a, rows, chunk, form)


@inlined
def _multiply_chunk(a: Any, start: int, chunk: int, form: Any) -> None:
    """The sums of a chunk's groups, or of a block so far, of a tile's rows and 64 outputs."""
    (of_rows, kind, _, joins), fetch = form
    size, per_block = CHUNK if joins else group_of(kind), constants_of(kind)[1] // CHUNK
    n_bytes = a[N_IN] * 2
    x = a[of_rows] + start * n_bytes + chunk * CHUNK * 2
    values, found = a[VALUES] + chunk % VISIT * TILE_BYTES, a[FOUND] + chunk % 2 * 2 * GROUP_BYTES
    for i in range(CHUNK // size):
        if joins == 0 or chunk % per_block == 0:
            zero(0)
            zero(1)
            zero(2)
            zero(3)
        weights = values + i * size // 2 * STEP_BYTES
        add_products(
            x + i * size * 2, n_bytes, weights, part_of(fetch, a[RECORDS], (chunk, i, CHUNK // size))
        )
        if joins == 0 or (chunk + 1) % per_block == 0:
            store_sums(found + i * GROUP_BYTES)


@inlined
def _scale_tile(a: Any, rows: Any, chunk: int, form: Any) -> None:
    """Add what the sums of a chunk's groups make, scaled, to the totals of a tile's rows from the first on."""
    first, start = rows
    row = first
    while row < min(first + MOST_ROWS, a[N_ROWS]):
        n = tile_rows(a[N_ROWS] - row)
        place = row, row - first, row - start
        if n == 8:
            _scale(a, place, chunk, (form, 8))
        elif n == 4:
            _scale(a, place, chunk, (form, 4))
        else:
            _scale(a, place, chunk, (form, 1))
        row += n


@inlined
def _scale(a: Any, at: Any, chunk: int, form: Any) -> None:
    """The same for n rows. at: where they are in all, among partial sums and groups'. form: (of tiles, n)."""
    (row, of_partial, of_found), ((_, kind, way, _), n) = at, form
    partial = a[PARTIAL] + of_partial * STEP_BYTES
    found = a[FOUND] + chunk % 2 * 2 * GROUP_BYTES + of_found * STEP_BYTES
    fields = a[SUMS] + (row * (a[N_IN] // CHUNK) + chunk * n) * FIELD_BYTES
    for first in range(0, PANEL, WIDTH):
        place = 0, fields, a[RECORDS], chunk, first, a[TOTALS] + row * STEP_BYTES, partial
        scale_group(place, (kind, n, way, 0), found)
        if group_of(kind) < CHUNK:
            scale_group(place, (kind, n, way, 1), found + GROUP_BYTES)
    end_chunk(a, (row, n), chunk, kind, partial)
