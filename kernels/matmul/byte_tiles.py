"""Products with codes as bytes in the tiles of AMX: what `narrow_sums.py` does with eight rows, the same bits, faster.

A row is two of a tile: the higher bytes of its inputs, and the lower (`code_bytes.py`). Sums are of integers, so it
does not matter who adds them, and up to eight rows are left to the instruction for vectors.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from slipstream.kernels import threads
from slipstream.kernels.compiled import inlined, long_pointer
from slipstream.kernels.matmul.amx import configure, load, multiply_signed, release, store, zero
from slipstream.kernels.matmul.arrange import FIELD_BYTES, N_IN, N_ROWS, SUMS, TILES
from slipstream.kernels.matmul.block_steps import lay_chunk, scale_group
from slipstream.kernels.matmul.formats import CHUNK, OF_BYTES, OF_SIGNED
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
from slipstream.kernels.matmul.tile_sums import LINE, STEP_BYTES, VECTOR_ROWS, fetch_quarter
from slipstream.kernels.vector import WIDTH

CHUNK_BYTES = CHUNK // 4 * STEP_BYTES  # of a panel's codes
SUMS_BYTES = 16 * STEP_BYTES  # of a chunk


@functools.cache
def block_task(kind: str) -> int:
    """Address of what adds one panel's products with blocks of that type, whose groups are of 32 inputs."""

    def items(address: int) -> None:
        a = long_pointer(address)
        has_tiles = a[N_ROWS] > VECTOR_ROWS
        if has_tiles:
            configure(np.int64(16), np.int64(CHUNK // 2))
        add_blocks(a, kind, OF_BYTES, _add_eight)
        if has_tiles:
            release()

    return threads.compile_task(items)


@inlined
def _add_eight(a: Any, row: int, span: Any, form: Any) -> None:
    """Some chunks of eight rows, in tiles where there are more than these."""
    if a[N_ROWS] > VECTOR_ROWS:
        _add_tile(a, row, span, form)
    else:
        add_span(a, row, span, form)


@inlined
def _add_tile(a: Any, row: int, span: Any, form: Any) -> None:
    """Some chunks of eight rows. The first lay down what codes stand for, a step before it is loaded into tiles."""
    fetch = share_of(a, row, 8, form[0])
    for step in range(span[0], span[1] + 3):
        if row == 0 and step < span[1]:
            values = a[VALUES] + step % VISIT * CHUNK_BYTES
            lay_chunk((0, 0, a[RECORDS], step, 0, 0, 0), form[0], OF_SIGNED, values)
        if step > span[0]:
            _do_chunk(a, (row, step - 1), span, (form[0], fetch))


@inlined
def _do_chunk(a: Any, at: Any, span: Any, form: Any) -> None:
    """Multiply a chunk, and scale the sums of the last but one.

    Two tiles are multiplied while vectors scale and the sums of the other two are stored, so that all parts of the CPU
    are busy. at: (first row, chunk); form: (kind, of `share_of`).
    """
    (row, chunk), (kind, fetch), old = at, form, (at[0], at[1] - 2)
    sums, before = a[FOUND] + chunk % 2 * SUMS_BYTES, a[FOUND] + (chunk + 1) % 2 * SUMS_BYTES
    w, ahead = a[VALUES] + chunk % VISIT * CHUNK_BYTES, part_of(fetch, a[RECORDS], (chunk, 0, 1))
    if chunk < span[1]:
        _multiply_half(a[TILES] + (row * (a[N_IN] // CHUNK) + chunk * 8) * CHUNK * 2, w, ahead)
    if old[1] >= span[0]:
        _scale(a, old, 0, (kind, sums))
        _scale(a, old, WIDTH, (kind, sums))
    store(2, before + 2 * LINE, STEP_BYTES)
    store(3, before + 3 * LINE, STEP_BYTES)
    if chunk < span[1]:
        _multiply_other_half(w, ahead)
    if old[1] >= span[0]:
        _scale(a, old, 2 * WIDTH, (kind, sums))
        _scale(a, old, 3 * WIDTH, (kind, sums))
        end_chunk(a, (row, 8), old[1], kind, a[PARTIAL])
    if chunk < span[1]:
        store(0, sums, STEP_BYTES)
        store(1, sums + LINE, STEP_BYTES)


@inlined
def _multiply_half(x: int, w: int, ahead: Any) -> None:
    """The first 32 outputs of a chunk."""
    zero(0)
    zero(1)
    load(4, x, CHUNK)
    fetch_quarter(ahead, 0)
    load(5, w, STEP_BYTES)
    multiply_signed(0, 5)
    fetch_quarter(ahead, 1)
    load(6, w + LINE, STEP_BYTES)
    multiply_signed(1, 6)


@inlined
def _multiply_other_half(w: int, ahead: Any) -> None:
    zero(2)
    zero(3)
    fetch_quarter(ahead, 2)
    load(7, w + 2 * LINE, STEP_BYTES)
    multiply_signed(2, 7)
    fetch_quarter(ahead, 3)
    load(5, w + 3 * LINE, STEP_BYTES)
    multiply_signed(3, 5)


@inlined
def _scale(a: Any, at: Any, first: int, form: Any) -> None:
    """Add what the sums of 16 outputs make, scaled, to totals or partial sums. form: (kind, address of the sums)."""
    (row, chunk), (kind, sums) = at, form
    fields = a[SUMS] + (row * (a[N_IN] // CHUNK) + chunk * 8) * FIELD_BYTES
    place = 0, fields, a[RECORDS], chunk, first, a[TOTALS] + row * STEP_BYTES, a[PARTIAL]
    scale_group(place, (kind, 8, OF_SIGNED, 0), sums)
