"""Products with parts in records in the tiles of AMX: as `narrow_sums.py`, for bfloat16 rows where the CPU has them.

What the codes of 32 inputs and 64 outputs stand for is laid down once, as a panel of plain weights is, and multiplied
with all rows, 16 at a time. A tile adds up a group's inputs as `tile_sums.py` says; sums are scaled as without tiles.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from slipstream.kernels import threads
from slipstream.kernels.compiled import inlined, long_pointer
from slipstream.kernels.matmul.amx import configure, release, zero
from slipstream.kernels.matmul.formats import CHUNK, LAYOUTS
from slipstream.kernels.matmul.narrow_sums import (
    FOUND,
    N_IN,
    N_ROWS,
    PARTIAL,
    RECORDS,
    SUM_BYTES,
    SUMS,
    TOTALS,
    VALUES,
    VISIT,
    X,
    end_chunk,
    tile_rows,
)
from slipstream.kernels.matmul.records import constants_of
from slipstream.kernels.matmul.tile_sums import MOST_ROWS, STEP_BYTES, TILE_BYTES, add_products, store_sums
from slipstream.kernels.matmul.unpack import SUM_ROWS, lay_chunk, scale_chunk

GROUP_BYTES = SUM_ROWS * STEP_BYTES  # of a group's sums


@functools.cache
def block_task(kind: str) -> int:
    """Address of what adds one panel's products with blocks of that type."""
    form = LAYOUTS[kind]
    group, joins = form.group, int(form.is_nested and not form.factor)

    def items(address: int) -> None:
        _add_blocks(long_pointer(address), (kind, group, joins))

    return threads.compile_task(items)


@inlined
def _add_blocks(a: Any, form: Any) -> None:
    """Add the products of 64 outputs to the totals. a: the arguments.

    form: (kind, inputs of a group, 1 if a block's groups are added up before they are scaled).
    """
    n_rows, n_chunks = a[N_ROWS], a[N_IN] // CHUNK
    most = min(n_rows, MOST_ROWS)
    configure(max(most, 1), np.int64(form[1]))
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
    kind, _, joins = form
    per_block = constants_of(kind)[1] // CHUNK
    for step in range(span[0], span[1] + 2):
        if rows[0] == 0 and step < span[1]:
            values = a[VALUES] + step % VISIT * TILE_BYTES
            lay_chunk((0, 0, a[RECORDS], step, 0, 0, 0), kind, values)
        chunk = step - 1
        if span[0] <= chunk < span[1]:
            _multiply_chunk(a, rows[1], chunk, (form, per_block))
        chunk = step - 2
        if chunk >= span[0] and (joins == 0 or (chunk + 1) % per_block == 0):
            _scale_tile(a, rows, chunk, kind)


@inlined
def _multiply_chunk(a: Any, start: int, chunk: int, form: Any) -> None:
    """The sums of a chunk's groups, or of a block so far, of a tile's rows and 64 outputs."""
    (_, group, joins), per_block = form
    n_bytes = a[N_IN] * 2
    x = a[X] + start * n_bytes + chunk * CHUNK * 2
    values, found = a[VALUES] + chunk % VISIT * TILE_BYTES, a[FOUND] + chunk % 2 * 2 * GROUP_BYTES
    for i in range(CHUNK // group):
        if joins == 0 or chunk % per_block == 0:
            zero(0)
            zero(1)
            zero(2)
            zero(3)
        weights = values + i * group // 2 * STEP_BYTES
        add_products(x + i * group * 2, n_bytes, weights, (0, (0, 0)))
        if joins == 0 or (chunk + 1) % per_block == 0:
            store_sums(found + i * GROUP_BYTES)


@inlined
def _scale_tile(a: Any, rows: Any, chunk: int, kind: Any) -> None:
    """Add what the sums of a chunk's groups make, scaled, to the totals of a tile's rows from the first on."""
    first, start = rows
    row = first
    while row < min(first + MOST_ROWS, a[N_ROWS]):
        n = tile_rows(a[N_ROWS] - row)
        place = row, row - first, row - start
        if n == 8:
            _scale(a, place, chunk, (kind, 8))
        elif n == 4:
            _scale(a, place, chunk, (kind, 4))
        else:
            _scale(a, place, chunk, (kind, 1))
        row += n


@inlined
def _scale(a: Any, place: Any, chunk: int, form: Any) -> None:
    """The same for n rows. place: where they are in all, among partial sums and groups'. form: (kind, n)."""
    (row, of_partial, of_found), (kind, n) = place, form
    n_chunks, totals = a[N_IN] // CHUNK, a[TOTALS] + row * STEP_BYTES
    partial = a[PARTIAL] + of_partial * STEP_BYTES
    found = a[FOUND] + chunk % 2 * 2 * GROUP_BYTES + of_found * STEP_BYTES
    inputs = a[SUMS] + (row * n_chunks + chunk * n) * SUM_BYTES
    scale_chunk((0, inputs, a[RECORDS], chunk, 0, totals, partial), kind, n, found)
    end_chunk(a, (row, n), chunk, kind, partial)
