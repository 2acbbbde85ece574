"""How rows lie while they are multiplied by packed blocks: in tiles of eight, four or one, for each kind of products.

Beside them, for every 32 inputs of a row, are the sums of all, of the first 16 and of the others, and what bytes have
more (`code_bytes.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from slipstream.kernels import threads
from slipstream.kernels.amx import HAS_TILES
from slipstream.kernels.compiled import (
    KINDS,
    fetch_add,
    float_pointer,
    inlined,
    long_pointer,
    pointer,
    shifted,
)
from slipstream.kernels.matmul.code_a8 import INPUT_BYTES, lay_steps
from slipstream.kernels.matmul.code_bytes import find_unit, lay_inputs, round_inputs
from slipstream.kernels.matmul.emit import N_FIELDS
from slipstream.kernels.matmul.formats import CHUNK, OF_A8, OF_BYTES, OF_PAIRS, OF_TILES
from slipstream.kernels.matmul.tile_sums import TILE_ROWS, VECTOR_ROWS
from slipstream.kernels.matmul.unpack import MOST_ROWS
from slipstream.kernels.vector import WIDTH, load, sum_lanes

GROUPS, N_GROUPS, N_PANELS, MOST, N_THREADS, ARRIVED, NEXT = range(7)  # of a call; MOST: rows of a group
# Arguments of a group; the first of them, and more, are those of what adds one panel's products to the totals. ROUNDED
# are rows in whole units (`code_bytes.py`): [tiles, chunks, 16 rows, 32].
X, TILES, SUMS, N_ROWS, N_IN, ROUNDED, OUT, BIAS, SEGMENTS, N_OUT, ARRANGED, GROUP_FIELDS = range(12)
FIELD_BYTES = 4 * N_FIELDS  # of a chunk of a row's inputs
FEW = 4  # rows, at most, of the smaller tile


@inlined
def tile_rows(left: int, in_eights: Any) -> int:
    """Rows that are computed together of those that are left; where they are fewer, the last is done again."""
    if MOST_ROWS == 8 and (in_eights or left > FEW):
        return 8
    return FEW if left > 1 else 1


@inlined
def _arrange(a: Any, kind: Any, copy: Any, of_tiles: Any) -> None:
    """Copy rows into tiles, and add up the inputs of every 32.

    a: the arguments; kind: of an input; copy: (a, row of inputs, (first row of the tile, its rows, which of them)).
    of_tiles: whether AMX multiplies them, but for few.
    """
    n_rows = a[N_ROWS]
    in_eights = of_tiles and n_rows > VECTOR_ROWS
    tile = fetch_add(shifted(a, ARRANGED), 1)
    while tile * 8 < n_rows:
        row = tile * 8
        while row < min(tile * 8 + 8, n_rows):
            n = tile_rows(n_rows - row, in_eights)
            for r in range(n):
                source = min(row + r, n_rows - 1)
                copy(a, source, (row, n, r))
                _add_inputs(a, pointer(a[X], kind), source, (row, n, r))
            row += n
        tile = fetch_add(shifted(a, ARRANGED), 1)


@inlined
def _copy_nothing(a: Any, source: int, at: Any) -> None:
    """For tiles of AMX, which read rows where they are."""


@inlined
def _copy_floats(a: Any, source: int, at: Any) -> None:
    """As [steps, rows of the tile, 2] float32."""
    _copy_words(a, source, at, np.int64)


@inlined
def _copy_pairs(a: Any, source: int, at: Any) -> None:
    """As [steps, rows of the tile] pairs of bfloat16."""
    _copy_words(a, source, at, np.uint32)


@inlined
def _copy_words(a: Any, source: int, at: Any, word: Any) -> None:
    row, n, r = at
    n_steps = a[N_IN] // 2
    x, tiles = pointer(a[X], word), pointer(a[TILES], word)
    for step in range(n_steps):
        tiles[row * n_steps + step * n + r] = x[source * n_steps + step]


@inlined
def _widen(a: Any, source: int, at: Any) -> None:
    """bfloat16 as [steps, rows of the tile, 2] float32."""
    row, n, r = at
    n_steps = a[N_IN] // 2
    x, tiles = pointer(a[X], np.uint32), pointer(a[TILES], np.int64)
    for step in range(n_steps):
        bits = np.int64(x[source * n_steps + step])
        tiles[row * n_steps + step * n + r] = (bits & 0xFFFF) << 16 | bits >> 16 << 48


@inlined
def _copy_bytes(a: Any, source: int, at: Any) -> None:
    """bfloat16 as integers: [chunks, rows of the tile, 2, 32] bytes, or [.., 32] shorts (`code_bytes.py`).

    And in whole units, or only so: whatever has a place.
    """
    _lay_chunks(a, source, at, _lay_units)


@inlined
def _lay_units(a: Any, inputs: Any, place: Any) -> None:
    (x, fields), (first, r, of_tiles) = inputs, place
    find_unit(x, fields)
    if a[TILES] != 0:
        lay_inputs(x, a[TILES] + (first + r) * CHUNK * 2, fields)
    if a[ROUNDED] != 0:
        round_inputs(x, a[ROUNDED] + of_tiles * CHUNK * 2, fields)


@inlined
def _copy_steps(a: Any, source: int, at: Any) -> None:
    """bfloat16 as integers of eight bits: [chunks, rows of the tile, 32] bytes (`code_a8.py`).

    Behind those of a chunk's rows they are in 16 bits, on CPUs that want that, too.
    """
    _lay_chunks(a, source, at, _lay_steps)


@inlined
def _lay_steps(a: Any, inputs: Any, place: Any) -> None:
    (x, fields), (first, r, of_tiles) = inputs, place
    if a[TILES] != 0:
        begin = a[TILES] + first * CHUNK * INPUT_BYTES
        lay_steps(x, (begin + r * CHUNK, begin + (fields[1] + 2 * r) * CHUNK), fields)
    if a[ROUNDED] != 0:  # of AMX, whose CPUs want bytes alone
        lay_steps(x, (a[ROUNDED] + of_tiles * CHUNK, 0), fields)


@inlined
def _lay_chunks(a: Any, source: int, at: Any, lay: Any) -> None:
    """lay: (a, (32 inputs, their fields), where they go: (first row of the tile, which row, place in tiles of AMX))."""
    row, n, r = at
    n_chunks = a[N_IN] // CHUNK
    tile, line = (row + r) // TILE_ROWS, (row + r) % TILE_ROWS
    for chunk in range(n_chunks):
        x = a[X] + (source * a[N_IN] + chunk * CHUNK) * 2
        first = row * n_chunks + chunk * n
        fields = a[SUMS] + (first * N_FIELDS + r) * 4, n
        lay(a, (x, fields), (first, r, (tile * n_chunks + chunk) * TILE_ROWS + line))


@inlined
def _add_inputs(a: Any, x: Any, source: int, at: Any) -> None:
    """Sums of each 32 inputs of a row: of all, of the first 16, of the last. at: (first row of the tile, n, r)."""
    row, n, r = at
    sums, n_chunks = float_pointer(a[SUMS]), a[N_IN] // CHUNK
    for chunk in range(n_chunks):
        first = sum_lanes(load(x, source * a[N_IN] + chunk * CHUNK))
        second = sum_lanes(load(x, source * a[N_IN] + chunk * CHUNK + WIDTH))
        place = (row * n_chunks + chunk * n) * N_FIELDS + r
        sums[place], sums[place + n], sums[place + 2 * n] = first + second, first, second


@functools.cache
def arrange_task(dtype: torch.dtype, way: str) -> int:
    """Address of the compiled task that comes before, for inputs of this dtype."""
    kind, widens = KINDS[dtype], int(dtype is torch.bfloat16)

    def items(address: int) -> None:
        a = long_pointer(address)
        for i in range(a[N_GROUPS]):
            group = shifted(long_pointer(a[GROUPS]), i * GROUP_FIELDS)
            if way == OF_TILES:
                _arrange(group, kind, _copy_nothing, 1)
            elif way == OF_BYTES:
                _arrange(group, kind, _copy_bytes, int(HAS_TILES))
            elif way == OF_A8:
                _arrange(group, kind, _copy_steps, int(HAS_TILES))
            elif way == OF_PAIRS:
                _arrange(group, kind, _copy_pairs, 0)
            elif widens:
                _arrange(group, kind, _widen, 0)
            else:
                _arrange(group, kind, _copy_floats, 0)

    return threads.compile_task(items)
