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
from slipstream.kernels.amx import HAS_TILES
from slipstream.kernels.compiled import (
    KINDS,
    fetch_add,
    float_pointer,
    inlined,
    int_pointer,
    long_kernel,
    long_pointer,
    on_line,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.matmul.arrange import (
    ARRANGED,
    ARRIVED,
    BIAS,
    FIELD_BYTES,
    GROUP_FIELDS,
    GROUPS,
    MOST,
    N_GROUPS,
    N_IN,
    N_OUT,
    N_PANELS,
    N_ROWS,
    N_THREADS,
    NEXT,
    OUT,
    ROUNDED,
    SEGMENTS,
    SUMS,
    TILES,
    X,
    arrange_task,
    tile_rows,
)
from slipstream.kernels.matmul.block_steps import (
    INPUT_BYTES,
    add_chunk,
    bytes_of_input,
    columns_of,
    end_block,
)
from slipstream.kernels.matmul.emit import N_FIELDS
from slipstream.kernels.matmul.formats import CHUNK, OF_A8, OF_UNITS, PANEL
from slipstream.kernels.matmul.panel_sums import BY_FLOATS
from slipstream.kernels.matmul.records import constants_of
from slipstream.kernels.matmul.tile_sums import BY_TWOS, LINE, TILE_ROWS, VECTOR_ROWS
from slipstream.kernels.matmul.unpack import LAYS, MOST_ROWS
from slipstream.kernels.vector import WIDTH, load, store, store_part

# Chunks of 32 inputs that all rows take before the next: their codes, or what these stand for, stay in the first cache.
VISIT = 4 if LAYS else 8
# Bytes from a row's partial sums to the next row's. Where a visit ends before a block does, each row has its own.
PARTIAL_BYTES = PANEL * 4 if LAYS else 0
# Arguments, behind those of a group, of what adds one panel's products. FOUND and VALUES are where tiles keep groups'
# sums and what codes stand for.
RECORDS, TOTALS, PARTIAL, FOUND, VALUES = range(6, 11)
FIRST_PANEL, TASK, ADDRESS, PANEL_BYTES, FIRST_OUTPUT, SEGMENT_OUTPUTS, FIELDS = range(7)  # of a segment
SPREAD = 8  # words between the threads' counters, so that each has a line of the cache
N_FOUND = 2 * TILE_ROWS if HAS_TILES else 0  # rows of 64 sums: of two products
N_VALUES = VISIT * CHUNK * PANEL if HAS_TILES or LAYS else 0  # words of what codes stand for, at most
PADDING = 7  # rows that a group's last tile may have too many


def multiply(addresses: Any, shape: Any, forms: Any, n_threads: int) -> None:
    """Multiply each group's rows by its matrix.

    addresses: of inputs [n_rows, n_in], results [n_rows, n_out], a table [n_matrices, 2] of addresses of biases and
    segments, and ids [n_groups] and starts [n_groups + 1] of groups, int32, the last of which may have no rows; 0 for
    one group of all rows.
    shape: (n_rows, n_in, n_out, panels of a matrix, n_groups). forms: the dtype of inputs, what products are of, the
    dtype of results, and whether any parts read inputs as whole units, and any as bytes, however many rows there are.
    """
    x_dtype, way, out_dtype, (in_units, in_bytes) = forms
    tasks = arrange_task(x_dtype, way), _task[out_dtype]
    in_units = in_units and (not HAS_TILES or shape[0] > VECTOR_ROWS)  # few rows are multiplied in bytes
    of_tile = INPUT_BYTES.get(way, 2) if in_bytes or not in_units else 0
    of_rounded = 0 if not in_units else 1 if way == OF_A8 else 2
    _run(addresses, shape, tasks, (x_dtype.itemsize, of_tile, of_rounded, out_dtype.itemsize), n_threads)


@inlined
def add_blocks(a: Any, kind: Any, way: Any, most: Any) -> None:
    """Add the products of 64 outputs to the totals.

    a: the arguments; kind: the blocks' type; way: of products; most: rows of the largest tile that is compiled for it.
    """
    n_rows, n_chunks = a[N_ROWS], a[N_IN] // CHUNK
    for begin in range(0, n_chunks, VISIT):
        span = begin, min(begin + VISIT, n_chunks)
        row = np.int64(0)  # as a constant, all below would be compiled for it, too
        while row < n_rows:
            n = tile_rows(n_rows - row, 0)
            if MOST_ROWS == 8 and most == 8 and n == 8:
                add_span(a, row, span, (kind, 8, way))
            elif n == 4:
                add_span(a, row, span, (kind, 4, way))
            else:
                add_span(a, row, span, (kind, 1, way))
            row += n


@inlined
def share_of(a: Any, row: int, n_rows: int, kind: Any) -> Any:
    """What the tile that begins with a row brings nearer with each chunk: (bytes of a chunk, how far ahead, lines).

    Each tile of n_rows a share of what the next visit reads, so that memory is neither idle nor in a rush; a tile that
    is alone, which does not wait for others, a little ahead.
    """
    chunk_bytes = constants_of(kind)[11] * CHUNK // constants_of(kind)[1]
    n_tiles, n_lines = (a[N_ROWS] + n_rows - 1) // n_rows, (chunk_bytes + LINE - 1) // LINE
    ahead = chunk_bytes * (4 if n_tiles == 1 else VISIT)
    return (
        chunk_bytes,
        ahead,
        (n_lines * (row // n_rows) // n_tiles, n_lines * (row // n_rows + 1) // n_tiles),
    )


@inlined
def part_of(share: Any, records: int, at: Any) -> Any:
    """Of these lines those of one group, for `fetch_quarter`. at: (chunk, group of the chunk, how many: 1 or 2)."""
    (chunk_bytes, ahead, (first, last)), (chunk, group, n_groups) = share, at
    n = last - first
    lines = first + (n * group >> n_groups - 1), first + (n * (group + 1) >> n_groups - 1)
    return records + chunk * chunk_bytes + ahead, lines


@inlined
def add_span(a: Any, row: int, span: Any, form: Any) -> None:
    """The same for the rows of a tile and some chunks of inputs. form: (kind, n_rows, way), constants."""
    kind, n, way = form
    totals, partial = a[TOTALS] + row * PANEL * 4, a[PARTIAL] + row * PARTIAL_BYTES
    for chunk in range(span[0], span[1]):
        x, sums = inputs_at(a, (row, n), chunk, way)
        for first in range(0, PANEL, columns_of((kind, n, way)) * WIDTH):
            add_chunk((x, sums, a[RECORDS], chunk, first, totals, partial), (kind, n, way))
        end_chunk(a, (row, n), chunk, kind, partial)


@inlined
def inputs_at(a: Any, rows: Any, chunk: int, way: Any) -> Any:
    """Addresses of a chunk of a tile's inputs and of their sums. rows: (the first, how many)."""
    row, n = rows
    n_chunks = a[N_IN] // CHUNK
    place = row * n_chunks + chunk * n
    sums = a[SUMS] + place * FIELD_BYTES
    if way == OF_UNITS:
        of_tile = (row // TILE_ROWS * n_chunks + chunk) * TILE_ROWS + row % TILE_ROWS
        return a[ROUNDED] + of_tile * (CHUNK * 2), sums
    return a[TILES] + place * (CHUNK * bytes_of_input(way)), sums


@inlined
def end_chunk(a: Any, rows: Any, chunk: int, kind: Any, partial: int) -> None:
    """Behind a block's last chunk, add the partial sums to the totals of some rows. rows: (the first, how many)."""
    row, n = rows
    per_block = constants_of(kind)[1] // CHUNK
    if (chunk + 1) % per_block == 0:
        begin = chunk + 1 - per_block
        sums = a[SUMS] + (row * (a[N_IN] // CHUNK) + begin * n) * FIELD_BYTES
        end_block((0, sums, a[RECORDS], begin, 0, a[TOTALS] + row * PANEL * 4, partial), (kind, n))


@inlined
def _add_dense(a: Any, way: Any) -> None:
    """The same for weights of the rows' own dtype, in panels."""
    inputs_per_step, begin, add, end = way
    rows = float_pointer(a[X]), a[N_ROWS], a[N_IN] // inputs_per_step
    begin(a[N_ROWS])
    add(rows, float_pointer(a[RECORDS]), float_pointer(a[TOTALS]))
    end()


@functools.cache
def block_task(kind: str, way: str) -> int:
    """Address of what adds one panel's products with blocks. kind: their type; way: what products are of."""

    def items(address: int) -> None:
        add_blocks(long_pointer(address), kind, way, MOST_ROWS)

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
    n_partial = max(TILE_ROWS, (a[MOST] + PADDING) * PARTIAL_BYTES // (PANEL * 4))
    memory = np.zeros((n_partial + N_FOUND + a[MOST] + 8) * PANEL + WIDTH, np.float32)
    values, own = np.empty(N_VALUES + WIDTH, np.float32), np.empty(VALUES + 1, np.int64)
    own[PARTIAL], own[VALUES] = on_line(memory.ctypes.data), on_line(values.ctypes.data)
    own[FOUND] = own[PARTIAL] + n_partial * PANEL * 4
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
def with_rows(starts: Any, n_groups: int) -> int:
    """Groups up to the last that has rows."""
    while n_groups > 0 and starts[n_groups - 1] == starts[n_groups]:
        n_groups -= 1
    return n_groups


@long_kernel
def _run(addresses: Any, shape: Any, tasks: Any, n_bytes: Any, n_threads: int) -> None:
    """tasks: (before, the product). n_bytes: of an input, of one in a tile, of a rounded one or 0,
    of a result."""
    n_rows, n_in, n_out, n_panels, n_groups = shape
    if addresses[4] != 0:
        n_groups = with_rows(int_pointer(addresses[4]), n_groups)
    of_input, of_tile, of_rounded, of_result = n_bytes
    n_padded = n_rows + PADDING * n_groups
    # With room for beginning on a line of the cache: tiles of AMX are loaded line by line.
    tiles = np.empty(n_padded * n_in * of_tile // 8 + 8, np.int64)
    rounded = np.empty((n_rows + TILE_ROWS * n_groups) * n_in * of_rounded // 8 + 8, np.int64)
    sums = np.empty(n_padded * n_in // CHUNK * N_FIELDS, np.float32)
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
        group[TILES] = on_line(tiles.ctypes.data) + place * n_in * of_tile if of_tile else 0
        group[SUMS] = sums.ctypes.data + place * (n_in // CHUNK) * FIELD_BYTES
        of_tiles = first + TILE_ROWS * i
        group[ROUNDED] = on_line(rounded.ctypes.data) + of_tiles * n_in * of_rounded if of_rounded else 0
        group[N_ROWS], group[N_IN], group[N_OUT], group[ARRANGED] = end - first, n_in, n_out, 0
        group[BIAS], group[SEGMENTS] = table[2 * matrix], table[2 * matrix + 1]
        a[MOST] = max(a[MOST], end - first)
    a[GROUPS], a[N_GROUPS], a[N_PANELS] = groups.ctypes.data, n_groups, n_panels
    a[N_THREADS], a[ARRIVED] = n_threads, 0
    threads.run(tasks[0], a.ctypes.data, n_threads if n_rows > 8 else 1)
    for i in range(n_threads):
        a[NEXT + i * SPREAD] = n_groups * n_panels * i // n_threads
    threads.run(tasks[1], a.ctypes.data, n_threads)
    tiles[:0], rounded[:0], sums[:0], groups[:0], a[0] = 0, 0, 0, 0, 0  # keeps the memory alive until here
