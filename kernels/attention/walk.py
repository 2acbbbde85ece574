"""One work item of CPU attention: rows of one span (at most ITEM_ROWS) against some K/V heads, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.attention.tiles import (
    BLOCK,
    GATHERED,
    LEAST,
    gather,
    gather_narrow,
    gather_rest,
    score,
    soften,
)
from slipstream.kernels.chunk import CHUNK, load_high_as, load_low_as, store_chunk
from slipstream.kernels.compiled import (
    address_of,
    double_of,
    float_pointer,
    inlined,
    int_pointer,
    long_pointer,
    shifted,
)
from slipstream.kernels.exponential import exp
from slipstream.kernels.vector import load, splat, store

ITEM_LANES = 64  # slots up to which an item takes several heads: they should stay in the cache
ITEM_ROWS = 64  # rows of a span in one item: more need more scratch memory, fewer read the cache more often
# The int64 arguments of a task; SCALE holds the bits of a float64, NEXT is the next item, shared by the threads.
# SINKS and WHOLES are 0 where there are none.
Q, KEYS, VALUES, OUT, SINKS, WHOLES, STARTS, PAST, TABLE = range(9)
N_SPANS, N_TABLE, N_HEADS, N_KV, PAGE, D_HEAD, D_VALUE, WINDOW, N_THREADS, N_ITEMS, NEXT, SCALE = range(9, 21)
NO_WINDOW = 1 << 40  # wider than any text, and far from overflow in a sum


@inlined
def _padded(width: int) -> int:
    """Elements of a head in whole chunks."""
    padded: int = (width + CHUNK - 1) // CHUNK * CHUNK
    return padded


@inlined
def scratch(n_slots: int, d_head: int, d_value: int) -> Any:
    """Memory of one thread for items of up to n_slots slots (a slot holds a lane: a row's query head).

    (floats, longs, pointers into them): keep the arrays alive. Pointers: queries [n_slots, q_pad] and totals
    [n_slots, v_pad] in chunks, states [n_slots, 2] (largest score, sum of weights), sums [2, 64, 16],
    weights [2, 64], addresses of rows [4, 64] (this block's keys and values, the next one's), and behind them
    what each row of the item sees [64, 2] (first position and end).
    """
    q_pad, v_pad = _padded(d_head), _padded(d_value)
    floats = np.empty(n_slots * (q_pad + v_pad + 2) + 2 * BLOCK * 17 + 32, np.float32)
    longs = np.empty(4 * BLOCK + 2 * ITEM_ROWS, np.int64)
    # A vector that straddles two cache lines costs twice.
    sums = float_pointer((floats.ctypes.data + 63) // 64 * 64)
    weights = shifted(sums, 2 * BLOCK * 16)
    queries = shifted(weights, 2 * BLOCK)
    totals = shifted(queries, n_slots * q_pad)
    states = shifted(totals, n_slots * v_pad)
    return floats, longs, (queries, totals, states, sums, weights, long_pointer(longs.ctypes.data))


@inlined
def heads_per_item(a: Any, n_rows: int) -> int:
    """K/V heads that one item takes: few rows take several, which reads a page's neighbouring heads in one go."""
    n_lanes = min(n_rows, ITEM_ROWS) * (a[N_HEADS] // a[N_KV])
    share: int = (a[N_KV] + a[N_THREADS] - 1) // a[N_THREADS]
    fitting: int = ITEM_LANES // n_lanes
    return max(1, min(share, fitting))


@inlined
def attend_item(a: Any, item: Any, stores: Any, out: Any, memory: Any) -> None:
    """Attention of rows begin … end - 1 of span `span` for the query heads of K/V heads head … head_end - 1.

    a: the arguments. item: (span, begin, end, head, head_end). stores: (q, keys, values). memory: of `scratch`.
    """
    span, begin, end, head_begin, head_end = item
    keys, values = stores[1], stores[2]
    rows, following, seen = memory[5], shifted(memory[5], 2 * BLOCK), shifted(memory[5], 4 * BLOCK)
    n_rows, group = end - begin, a[N_HEADS] // a[N_KV]
    n_lanes = n_rows * group
    _see(a, (span, begin, end), seen)
    exist = seen[0], seen[2 * n_rows - 1] - 1
    first_row = end_row = 0
    _start(a, item, stores, memory)
    first_block = exist[0] // BLOCK * BLOCK
    _locate(a, (span, head_begin), (keys, values), (first_block, exist), following)
    for block in range(first_block, exist[1] + 1, BLOCK):
        # Rows that see nothing from the block on are done with, and those behind begin after it.
        while seen[2 * first_row + 1] <= block:
            first_row += 1
        while end_row < n_rows and seen[2 * end_row] < block + BLOCK:
            end_row += 1
        for head in range(head_begin, head_end):
            rows, following = following, rows
            if head + 1 < head_end:
                _locate(a, (span, head + 1), (keys, values), (block, exist), following)
            else:
                _locate(a, (span, head_begin), (keys, values), (block + BLOCK, exist), following)
            first_slot = (head - head_begin) * (n_lanes + 1)
            for lane in range(first_row * group, end_row * group, 2):
                row, row_next = lane // group, min(lane + 1, n_lanes - 1) // group
                pair = first_slot + lane, _of_block(seen, row, block), _of_block(seen, row_next, block)
                if lane == first_row * group:
                    _pair(a, pair, (rows, keys, values), memory, following)
                else:
                    _pair(a, pair, (rows, keys, values), memory, None)
    _finish(a, item, (out, keys), memory)


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
def _of_block(seen: Any, row: int, block: int) -> Any:
    """First and end of what a row sees of the block that begins at position `block`, counted from there."""
    return min(max(0, seen[2 * row] - block), BLOCK), min(BLOCK, seen[2 * row + 1] - block)


@inlined
def _pair(a: Any, pair: Any, block: Any, memory: Any, following: Any) -> None:
    """One block for the lanes in slots `slot` and slot + 1.

    pair: (slot, what it sees, what the next sees), first and end each; the next may not see any of the block yet.
    block: (addresses of key and value rows, pointers of their kinds).
    """
    slot, (first, end), (first_next, end_next) = pair
    rows, keys, values = block
    queries, totals, states, sums, weights, _ = memory
    d_value, q_pad, v_pad = a[D_VALUE], _padded(a[D_HEAD]), _padded(a[D_VALUE])
    state, addresses = shifted(states, 2 * slot), shifted(rows, BLOCK)
    # Values are fetched while keys are read, and the next block's keys while values are, so that no more than half a
    # block waits in the cache for its turn.
    mine = None if following is None else (addresses, np.int64(0), d_value)
    score(shifted(queries, slot * q_pad), q_pad, (rows, keys), a[D_HEAD], sums, mine)
    factor, factor_next = soften(sums, (first, end), state, weights), splat(np.float32(1))
    if first_next < BLOCK:
        sums_next, weights_next = shifted(sums, BLOCK * 16), shifted(weights, BLOCK)
        factor_next = soften(sums_next, (first_next, end_next), shifted(state, 2), weights_next)
    # Where windows begin at different places each lane goes alone: a row must not touch what it does not see.
    end_both = end if first_next == first else first
    both, factors = (first, end_both), (factor, factor_next)
    wide = d_value - d_value % GATHERED
    for column in range(0, wide, GATHERED):
        total = shifted(totals, slot * v_pad + column)
        next_keys = _keys_of(following, a[D_HEAD], column, wide)
        gather(weights, (addresses, column, values), both, (total, v_pad), factors, next_keys)
    for column in range(wide, d_value, CHUNK):
        total = shifted(totals, slot * v_pad + column)
        columns = d_value - column, None
        gather_narrow(weights, (addresses, column, values), both, (total, v_pad), factors, columns)
    if end > end_both:
        _rest(a, (slot, weights), (addresses, values), (end_both, end), totals)
    if end_next > max(end_both, first_next):
        alone = max(end_both, first_next), end_next
        _rest(a, (slot + 1, shifted(weights, BLOCK)), (addresses, values), alone, totals)


@inlined
def _keys_of(following: Any, d_head: int, column: int, n_columns: int) -> Any:
    """The part of the next block's keys that is fetched with values from a column on, of so many gathered like that."""
    if following is None:
        return None
    return following, column * d_head // n_columns, (column + GATHERED) * d_head // n_columns


@inlined
def _rest(a: Any, lane: Any, rows: Any, positions: Any, totals: Any) -> None:
    """Positions (first, end) of a block for one lane alone. lane: (slot, its weights). rows: (addresses, kind)."""
    d_value, v_pad = a[D_VALUE], _padded(a[D_VALUE])
    slot, weights = lane
    for column in range(0, d_value, CHUNK):
        total = shifted(totals, slot * v_pad + column)
        gather_rest(weights, (rows[0], column, rows[1]), positions, total, d_value - column)


@inlined
def _start(a: Any, item: Any, stores: Any, memory: Any) -> None:
    """Copy the item's queries, scaled, in the order in which chunks of keys lie, and empty its totals.

    A head's lanes, row × group + head of the group, lie in neighbouring slots; one more keeps the last company.
    """
    _, begin, end, head_begin, head_end = item
    q, keys = stores[0], stores[1]
    queries, totals, states = memory[0], memory[1], memory[2]
    group, d_head, q_pad, v_pad = a[N_HEADS] // a[N_KV], a[D_HEAD], _padded(a[D_HEAD]), _padded(a[D_VALUE])
    scale, zero = splat(np.float32(double_of(a[SCALE]))), splat(np.float32(0))
    n_lanes = (end - begin) * group
    slot = 0
    for head in range(head_begin, head_end):
        for place in range(n_lanes + 1):
            lane = min(place, n_lanes - 1)
            row = shifted(q, ((begin + lane // group) * a[N_HEADS] + head * group + lane % group) * d_head)
            for d in range(0, d_head, CHUNK):
                at = slot * q_pad + d
                store(queries, at, scale * load_low_as(row, d, d_head - d, keys))
                store(queries, at + 16, scale * load_high_as(row, d, d_head - d, keys))
            for at in range(slot * v_pad, (slot + 1) * v_pad, 16):
                store(totals, at, zero)
            states[2 * slot] = LEAST
            states[2 * slot + 1] = np.float32(0)
            slot += 1


@inlined
def _locate(a: Any, where: Any, stores: Any, positions: Any, rows: Any) -> None:
    """Addresses of the key and value rows of a block; places before and after those that exist repeat the nearest.

    where: (span, head). positions: (first of the block, (first, last) that exist).
    """
    keys, values = stores
    block, (first, last) = positions
    page_size, d_head, d_value = a[PAGE], a[D_HEAD], a[D_VALUE]
    stride = a[N_KV] * page_size  # rows from page to page
    table = shifted(int_pointer(a[TABLE]), where[0] * a[N_TABLE])
    first = max(first, block)
    page, offset, row = first // page_size, first % page_size, 0
    if first <= last:
        row = table[page] * stride + where[1] * page_size + offset
    for i in range(BLOCK):
        if first < block + i <= last:
            offset += 1
            row += 1
            if offset == page_size:
                page += 1
                offset = 0
                row = table[page] * stride + where[1] * page_size
        rows[i] = address_of(shifted(keys, row * d_head))
        rows[BLOCK + i] = address_of(shifted(values, row * d_value))


@inlined
def _finish(a: Any, item: Any, targets: Any, memory: Any) -> None:
    """Divide by the sums of weights, sinks' included, and write the item's rows.

    targets: (out, a pointer of the values' kind).
    """
    out, like = targets
    _, begin, end, head_begin, head_end = item
    totals, states = memory[1], memory[2]
    group, d_value, v_pad = a[N_HEADS] // a[N_KV], a[D_VALUE], _padded(a[D_VALUE])
    n_lanes = (end - begin) * group
    slot = 0
    for head in range(head_begin, head_end):
        for lane in range(n_lanes):
            query_head = head * group + lane % group
            row = shifted(out, ((begin + lane // group) * a[N_HEADS] + query_head) * d_value)
            total = splat(states[2 * slot + 1])
            if a[SINKS] != 0:
                sink = splat(float_pointer(a[SINKS])[query_head])
                total = total + exp(sink - splat(states[2 * slot]))
            for d in range(0, d_value, CHUNK):
                at = slot * v_pad + d
                low, high = load(totals, at) / total, load(totals, at + 16) / total
                store_chunk(shifted(row, d), (low, high), d_value - d, like)
            slot += 1
        slot += 1
