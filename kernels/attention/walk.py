"""One work item of CPU attention: rows of one span (at most ITEM_ROWS) against some K/V heads, block by block.

How a block is computed is the caller's: `by_vectors.py` or `by_tiles.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.chunk import CHUNK, store_chunk
from slipstream.kernels.compiled import float_pointer, inlined, int_pointer, shifted
from slipstream.kernels.exponential import exp
from slipstream.kernels.vector import load, splat, sum_lanes

BLOCK = 64  # positions
LEAST = np.float32(-np.inf)
ITEM_LANES = 64  # lanes up to which an item takes several heads: they should stay in the cache
ITEM_ROWS = 64  # rows of a span in one item: more need more scratch memory, fewer read the cache more often
# The int64 arguments of a task; SCALE holds the bits of a float64, NEXT is the next item, shared by the threads.
# SINKS and WHOLES are 0 where there are none.
Q, KEYS, VALUES, OUT, SINKS, WHOLES, STARTS, PAST, TABLE = range(9)
N_SPANS, N_TABLE, N_HEADS, N_KV, PAGE, D_HEAD, D_VALUE, WINDOW, N_THREADS, N_ITEMS, NEXT, SCALE = range(9, 21)
NO_WINDOW = 1 << 40  # wider than any text, and far from overflow in a sum


@inlined
def padded(width: int) -> int:
    """Elements of a head in whole chunks."""
    padded: int = (width + CHUNK - 1) // CHUNK * CHUNK
    return padded


@inlined
def heads_per_item(a: Any, n_rows: int) -> int:
    """K/V heads that one item takes: few rows take several, which reads a page's neighbouring heads in one go."""
    n_lanes = min(n_rows, ITEM_ROWS) * (a[N_HEADS] // a[N_KV])
    share: int = (a[N_KV] + a[N_THREADS] - 1) // a[N_THREADS]
    fitting: int = ITEM_LANES // n_lanes
    return max(1, min(share, fitting))


@inlined
def slots_of(n_lanes: int, filling: Any) -> int:
    """Slots for the lanes of a head, so that the last have company. filling: (more than lanes, a multiple of what)."""
    more, unit = filling
    slots: int = (n_lanes + more) // unit * unit
    return slots


@inlined
def attend_item(a: Any, item: Any, stores: Any, out: Any, way: Any) -> None:
    """Attention of rows begin … end - 1 of span `span` for the query heads of K/V heads head … head_end - 1.

    a: the arguments. item: (span, begin, end, head, head_end). stores: (q, keys, values).
    way: (memory, filling, start, attend) of `by_vectors.py` or `by_tiles.py`. What `attend` is called with: the place,
    (span, (first position of the block, head), the same of what comes next, (first, last) position that some row sees,
    0 and 1 in turn); and the lanes, (first and end of the rows that see the block, rows of the item, the head's first
    slot).
    """
    span, begin, end, head_begin, head_end = item
    memory, filling, start, attend = way
    n_rows, seen = end - begin, memory[4]
    _see(a, (span, begin, end), seen)
    exist = seen[0], seen[2 * n_rows - 1] - 1
    n_slots = slots_of(n_rows * (a[N_HEADS] // a[N_KV]), filling)
    first_row = end_row = turn = 0
    first_block = exist[0] // BLOCK * BLOCK
    start(a, item, stores, (memory, exist, first_block))
    for block in range(first_block, exist[1] + 1, BLOCK):
        # Rows that see nothing from the block on are done with, and those behind begin after it.
        while seen[2 * first_row + 1] <= block:
            first_row += 1
        while end_row < n_rows and seen[2 * end_row] < block + BLOCK:
            end_row += 1
        for head in range(head_begin, head_end):
            following = (block, head + 1) if head + 1 < head_end else (block + BLOCK, head_begin)
            place = span, (block, head), following, exist, turn
            rows = first_row, end_row, n_rows, (head - head_begin) * n_slots
            attend(a, place, rows, stores, memory)
            turn = 1 - turn
    _finish(a, item, (out, stores[1]), memory, n_slots)


@inlined
def _see(a: Any, rows: Any, seen: Any) -> None:
    """Write what rows (span, begin, end) see, first position and end each: neither is less than the row before has."""
    span, begin, end = rows
    wholes = int_pointer(a[WHOLES])
    position = int_pointer(a[PAST])[span] + begin - int_pointer(a[STARTS])[span]
    for i in range(end - begin):
        seen[2 * i], seen[2 * i + 1] = max(0, position + i - a[WINDOW] + 1), position + i + 1
        if a[WHOLES] != 0:
            seen[2 * i] = min(seen[2 * i], wholes[2 * (begin + i)])
            seen[2 * i + 1] = max(seen[2 * i + 1], wholes[2 * (begin + i) + 1])


@inlined
def of_block(seen: Any, row: int, block: int) -> Any:
    """First and end of what a row sees of the block that begins at position `block`, counted from there."""
    return min(max(0, seen[2 * row] - block), BLOCK), min(BLOCK, seen[2 * row + 1] - block)


@inlined
def _finish(a: Any, item: Any, targets: Any, memory: Any, n_slots: int) -> None:
    """Divide by the sums of weights, sinks' included, and write the item's rows.

    targets: (out, a pointer of the values' kind).
    """
    out, like = targets
    _, begin, end, head_begin, head_end = item
    totals, states, sums = memory[1], memory[2], memory[3]
    group, d_value, v_pad = a[N_HEADS] // a[N_KV], a[D_VALUE], padded(a[D_VALUE])
    for head in range(head_begin, head_end):
        for lane in range((end - begin) * group):
            slot = (head - head_begin) * n_slots + lane
            query_head = head * group + lane % group
            row = shifted(out, ((begin + lane // group) * a[N_HEADS] + query_head) * d_value)
            total = splat(sum_lanes(load(sums, slot * 16)))
            if a[SINKS] != 0:
                sink = splat(float_pointer(a[SINKS])[query_head])
                total = total + exp(sink - splat(states[slot]))
            for d in range(0, d_value, CHUNK):
                at = slot * v_pad + d
                low, high = load(totals, at) / total, load(totals, at + 16) / total
                store_chunk(shifted(row, d), (low, high), d_value - d, like)
