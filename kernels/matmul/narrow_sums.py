"""Sums of products with parts in records: rows in tiles, panels shared by threads, one call for any number of matrices.

A call multiplies groups of rows, each with a matrix of its own: one group for a plain product, one an expert. What is
shared among the threads is a panel of 64 outputs of one matrix, for all rows of its group. `op.py` says which sums are
added in which order; neither groups nor threads change it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from slipstream.kernels import threads
from slipstream.kernels.compiled import (
    KINDS,
    fetch_add,
    float_pointer,
    inlined,
    int_pointer,
    long_kernel,
    long_pointer,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.matmul.formats import CHUNK, PANEL
from slipstream.kernels.matmul.panel_sums import BY_FLOATS
from slipstream.kernels.matmul.records import constants_of
from slipstream.kernels.matmul.tile_sums import BY_TWOS, HAS_TILES
from slipstream.kernels.matmul.unpack import (
    COLUMNS_1,
    COLUMNS_4,
    COLUMNS_8,
    MOST_ROWS,
    SUM_ROWS,
    add_chunk,
    end_block,
)
from slipstream.kernels.vector import WIDTH, load, store, store_part, sum_lanes

VISIT = 8  # chunks of 32 inputs taken with all rows before the next: their codes stay in the first cache
# Arguments of a group; the first of them, and three more, are those of what adds one panel's products to the totals.
X, TILES, SUMS, N_ROWS, N_IN, OUT, BIAS, SEGMENTS, N_OUT, ARRANGED, GROUP_FIELDS = range(11)
# The next of them; FOUND and VALUES are where `narrow_tiles.py` keeps groups' sums and what codes stand for.
RECORDS, TOTALS, PARTIAL, FOUND, VALUES = range(5, 10)
GROUPS, N_GROUPS, N_PANELS, MOST, N_THREADS, ARRIVED, NEXT = range(7)  # of a call; MOST: rows of a group
FIRST_PANEL, TASK, ADDRESS, PANEL_BYTES, FIRST_OUTPUT, SEGMENT_OUTPUTS, FIELDS = range(7)  # of a segment
SUM_BYTES = 12  # of a chunk's three sums of inputs
SPREAD = 8  # words between the threads' counters, so that each has a line of the cache
N_FOUND = 2 * 2 * SUM_ROWS if HAS_TILES else 0  # rows of 64 sums: of two chunks' groups
N_VALUES = VISIT * CHUNK * PANEL // 2 if HAS_TILES else 0  # words of two values
PADDING = 7  # rows that a group's last tile may have too many


def multiply(addresses: Any, shape: Any, dtypes: Any, n_threads: int) -> None:
    """Multiply each group's rows by its matrix.

    addresses: of inputs [n_rows, n_in], results [n_rows, n_out], a table [n_matrices, 2] of addresses of biases and
    segments, and ids [n_groups] and starts [n_groups + 1] of groups, int32, the last of which may have no rows; 0 for
    one group of all rows.
    shape: (n_rows, n_in, n_out, panels of a matrix, n_groups). dtypes: (of inputs, whether products are by pairs, of
    results).
    """
    x_dtype, by_pairs, out_dtype = dtypes
    tasks = _arrange_task(x_dtype, by_pairs), _task[out_dtype]
    _run(addresses, shape, tasks, (x_dtype.itemsize, 2 if by_pairs else 4, out_dtype.itemsize), n_threads)


@inlined
def tile_rows(left: int) -> int:
    """Rows that are computed together of those that are left; where they are fewer, the last is done again."""
    if left > 4 and MOST_ROWS == 8:
        return 8
    return 4 if left > 1 else 1


@inlined
def _arrange(a: Any, kind: Any, words: Any, two: Any) -> None:
    """Copy rows into tiles, [steps, rows of the tile] words of two inputs, and add up the inputs of every 32.

    a: the arguments; kind: of an input; words: of two inputs and of two in a tile; two: makes the second of the first,
    or is None where nothing is copied.
    """
    n_rows, n_steps = a[N_ROWS], a[N_IN] // 2
    x, tiles = pointer(a[X], words[0]), pointer(a[TILES], words[1])
    tile = fetch_add(shifted(a, ARRANGED), 1)
    while tile * 8 < n_rows:
        row = tile * 8
        while row < min(tile * 8 + 8, n_rows):
            n = tile_rows(n_rows - row)
            for r in range(n):
                source = min(row + r, n_rows - 1)
                if two is not None:
                    for step in range(n_steps):
                        tiles[row * n_steps + step * n + r] = two(x[source * n_steps + step])
                _add_inputs(a, pointer(a[X], kind), source, (row, n, r))
            row += n
        tile = fetch_add(shifted(a, ARRANGED), 1)


@inlined
def _add_inputs(a: Any, x: Any, source: int, at: Any) -> None:
    """Sums of each 32 inputs of a row: of all, of the first 16, of the last. at: (first row of the tile, n, r)."""
    row, n, r = at
    sums, n_chunks = float_pointer(a[SUMS]), a[N_IN] // CHUNK
    for chunk in range(n_chunks):
        first = sum_lanes(load(x, source * a[N_IN] + chunk * CHUNK))
        second = sum_lanes(load(x, source * a[N_IN] + chunk * CHUNK + WIDTH))
        place = (row * n_chunks + chunk * n) * 3 + r
        sums[place], sums[place + n], sums[place + 2 * n] = first + second, first, second


@inlined
def _add_blocks(a: Any, kind: Any, wide: Any) -> None:
    """Add the products of 64 outputs to the totals. a: the arguments; kind: the blocks' type; wide: 1 for float32."""
    n_rows, n_chunks = a[N_ROWS], a[N_IN] // CHUNK
    for begin in range(0, n_chunks, VISIT):
        span = begin, min(begin + VISIT, n_chunks)
        row = 0
        while row < n_rows:
            n = tile_rows(n_rows - row)
            if MOST_ROWS == 8 and n == 8:
                _add_span(a, row, span, (kind, 8, wide))
            elif n == 4:
                _add_span(a, row, span, (kind, 4, wide))
            else:
                _add_span(a, row, span, (kind, 1, wide))
            row += n


@inlined
def _add_span(a: Any, row: int, span: Any, form: Any) -> None:
    """The same for the rows of a tile and some chunks of inputs. form: (kind, n_rows, wide), constants."""
    kind, n, wide = form
    n_chunks, totals = a[N_IN] // CHUNK, a[TOTALS] + row * PANEL * 4
    for chunk in range(span[0], span[1]):
        x = a[TILES] + (row * n_chunks + chunk * n) * (CHUNK * 2 * (1 + wide))
        sums = a[SUMS] + (row * n_chunks + chunk * n) * SUM_BYTES
        n_columns = COLUMNS_8 if n == 8 else COLUMNS_4 if n == 4 else COLUMNS_1
        for first in range(0, PANEL, n_columns * WIDTH):
            add_chunk((x, sums, a[RECORDS], chunk, first, totals, a[PARTIAL]), kind, n, wide)
        end_chunk(a, (row, n), chunk, kind, a[PARTIAL])


@inlined
def end_chunk(a: Any, rows: Any, chunk: int, kind: Any, partial: int) -> None:
    """Behind a block's last chunk, add the partial sums to the totals of some rows. rows: (the first, how many)."""
    row, n = rows
    per_block = constants_of(kind)[1] // CHUNK
    if (chunk + 1) % per_block == 0:
        begin = chunk + 1 - per_block
        sums = a[SUMS] + (row * (a[N_IN] // CHUNK) + begin * n) * SUM_BYTES
        end_block((0, sums, a[RECORDS], begin, 0, a[TOTALS] + row * PANEL * 4, partial), kind, n)


@inlined
def _add_dense(a: Any, way: Any) -> None:
    """The same for weights of the rows' own dtype, in panels."""
    inputs_per_step, begin, add, end = way
    rows = float_pointer(a[X]), a[N_ROWS], a[N_IN] // inputs_per_step
    begin(a[N_ROWS])
    add(rows, float_pointer(a[RECORDS]), float_pointer(a[TOTALS]))
    end()


@functools.cache
def block_task(kind: str, wide: int) -> int:
    """Address of what adds one panel's products with blocks. kind: their type; wide: 1 for products of float32."""

    def items(address: int) -> None:
        _add_blocks(long_pointer(address), kind, wide)

    return threads.compile_task(items)


@per_dtype
def dense_task(kind: Any) -> int:
    """The same with a panel of inputs' and weights' kind."""
    by_twos = kind is KINDS[torch.bfloat16]

    def items(address: int) -> None:
        if by_twos:
            _add_dense(long_pointer(address), BY_TWOS)
        else:
            _add_dense(long_pointer(address), BY_FLOATS)

    return threads.compile_task(items)


@inlined
def _panels(a: Any, kind: Any) -> None:
    """Do panels until none is left: first those of this thread's own share, which lie together in memory."""
    n_items, n_threads = a[N_GROUPS] * a[N_PANELS], a[N_THREADS]
    memory = np.zeros((SUM_ROWS + N_FOUND + a[MOST] + 8) * PANEL + WIDTH, np.float32)
    values, own = np.empty(N_VALUES + WIDTH, np.float32), np.empty(VALUES + 1, np.int64)
    own[PARTIAL], own[VALUES] = (memory.ctypes.data + 63) // 64 * 64, (values.ctypes.data + 63) // 64 * 64
    own[FOUND] = own[PARTIAL] + SUM_ROWS * PANEL * 4
    own[TOTALS] = own[FOUND] + N_FOUND * PANEL * 4
    arrived = fetch_add(shifted(a, ARRIVED), 1)
    for turn in range(n_threads):
        share = (arrived + turn) % n_threads
        counter, end = shifted(a, NEXT + share * SPREAD), n_items * (share + 1) // n_threads
        item = fetch_add(counter, 1)
        while item < end:
            group = shifted(long_pointer(a[GROUPS]), item // a[N_PANELS] * GROUP_FIELDS)
            _one_panel(group, item % a[N_PANELS], pointer(group[OUT], kind), own)
            item = fetch_add(counter, 1)
    memory[:0], values[:0], own[:0] = 0, 0, 0  # keeps the memory alive until here


@inlined
def _one_panel(a: Any, panel: int, out: Any, own: Any) -> None:
    """64 outputs of a group's rows, from the bias to their place. own: this thread's arguments."""
    for i in range(RECORDS):
        own[i] = a[i]
    segment, n_rows = long_pointer(a[SEGMENTS]), a[N_ROWS]
    while panel >= segment[FIELDS + FIRST_PANEL]:
        segment = shifted(segment, FIELDS)
    place = panel - segment[FIRST_PANEL]
    bias = shifted(float_pointer(a[BIAS]), panel * PANEL)
    totals = float_pointer(own[TOTALS])
    for row in range(n_rows):
        for i in range(0, PANEL, WIDTH):
            store(totals, row * PANEL + i, load(bias, i))
    own[RECORDS] = segment[ADDRESS] + place * segment[PANEL_BYTES]
    threads.call(segment[TASK], own.ctypes.data)
    n_out = segment[SEGMENT_OUTPUTS] - place * PANEL
    for row in range(n_rows):
        target = shifted(out, row * a[N_OUT] + segment[FIRST_OUTPUT] + place * PANEL)
        for i in range(0, min(PANEL, n_out), WIDTH):
            store_part(target, i, load(totals, row * PANEL + i), n_out - i)


@per_dtype
def _task(kind: Any) -> int:
    """Address of the compiled task that multiplies, for results of this kind."""

    def items(address: int) -> None:
        _panels(long_pointer(address), kind)

    return threads.compile_task(items)


@inlined
def _same(word: Any) -> Any:
    return word


@inlined
def _two_floats(word: Any) -> Any:
    """Two float32 of two bfloat16."""
    bits = np.int64(word)
    return (bits & 0xFFFF) << 16 | bits >> 16 << 48


@functools.cache
def _arrange_task(dtype: torch.dtype, by_pairs: bool) -> int:  # noqa: FBT001
    """Address of the compiled task that comes before, for inputs of this dtype."""
    kind, word = KINDS[dtype], np.uint32 if dtype is torch.bfloat16 else np.int64
    widens, in_place = int(dtype is torch.bfloat16 and not by_pairs), int(by_pairs and HAS_TILES)

    def items(address: int) -> None:
        a = long_pointer(address)
        for i in range(a[N_GROUPS]):
            group = shifted(long_pointer(a[GROUPS]), i * GROUP_FIELDS)
            if in_place:
                _arrange(group, kind, (word, word), None)
            elif widens:
                _arrange(group, kind, (word, np.int64), _two_floats)
            else:
                _arrange(group, kind, (word, word), _same)

    return threads.compile_task(items)


@inlined
def with_rows(starts: Any, n_groups: int) -> int:
    """Groups up to the last that has rows."""
    while n_groups > 0 and starts[n_groups - 1] == starts[n_groups]:
        n_groups -= 1
    return n_groups


@long_kernel
def _run(addresses: Any, shape: Any, tasks: Any, n_bytes: Any, n_threads: int) -> None:
    """tasks: (before, the product). n_bytes: of an input, of one in a tile, of a result."""
    n_rows, n_in, n_out, n_panels, n_groups = shape
    if addresses[4] != 0:
        n_groups = with_rows(int_pointer(addresses[4]), n_groups)
    of_input, of_tile, of_result = n_bytes
    n_padded = n_rows + PADDING * n_groups
    tiles = np.empty(n_padded * n_in * of_tile // 8, np.int64)
    sums = np.empty(n_padded * n_in // CHUNK * 3, np.float32)
    groups = np.empty(n_groups * GROUP_FIELDS, np.int64)
    a = np.empty(NEXT + n_threads * SPREAD, np.int64)
    table, ids, starts = long_pointer(addresses[2]), int_pointer(addresses[3]), int_pointer(addresses[4])
    a[MOST] = 0
    for i in range(n_groups):
        matrix, first, end = np.int64(0), np.int64(0), np.int64(n_rows)
        if addresses[3] != 0:
            matrix, first, end = np.int64(ids[i]), np.int64(starts[i]), np.int64(starts[i + 1])
        group, place = groups[i * GROUP_FIELDS :], first + PADDING * i
        group[X], group[OUT] = (
            addresses[0] + first * n_in * of_input,
            addresses[1] + first * n_out * of_result,
        )
        group[TILES] = tiles.ctypes.data + place * n_in * of_tile
        group[SUMS] = sums.ctypes.data + place * (n_in // CHUNK) * SUM_BYTES
        group[N_ROWS], group[N_IN], group[N_OUT], group[ARRANGED] = end - first, n_in, n_out, 0
        group[BIAS], group[SEGMENTS] = table[2 * matrix], table[2 * matrix + 1]
        a[MOST] = max(a[MOST], end - first)
    a[GROUPS], a[N_GROUPS], a[N_PANELS] = groups.ctypes.data, n_groups, n_panels
    a[N_THREADS], a[ARRIVED] = n_threads, 0
    threads.run(tasks[0], a.ctypes.data, n_threads if n_rows > 8 else 1)
    for i in range(n_threads):
        a[NEXT + i * SPREAD] = n_groups * n_panels * i // n_threads
    threads.run(tasks[1], a.ctypes.data, n_threads)
    tiles[:0], sums[:0], groups[:0], a[0] = 0, 0, 0, 0  # keeps the memory alive until here
