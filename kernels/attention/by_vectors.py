"""Attention in vectors of float32: the lanes of an item two at a time (a lane is a row's query head).

Keys and values are widened where they are used; this is every CPU's way, for all kinds and widths.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.attention.vectors import GATHERED, gather, gather_narrow, gather_rest, score, soften
from slipstream.kernels.attention.walk import (
    BLOCK,
    D_HEAD,
    D_VALUE,
    ITEM_ROWS,
    LEAST,
    N_HEADS,
    N_KV,
    N_TABLE,
    PAGE,
    SCALE,
    TABLE,
    of_block,
    padded,
)
from slipstream.kernels.chunk import CHUNK, load_high_as, load_low_as
from slipstream.kernels.compiled import (
    address_of,
    double_of,
    float_pointer,
    inlined,
    int_pointer,
    long_pointer,
    on_line,
    shifted,
)
from slipstream.kernels.vector import splat, store


@inlined
def scratch(n_slots: int, d_head: int, d_value: int) -> Any:
    """Memory of one thread for items of up to n_slots slots.

    (floats, longs, pointers into them): keep the arrays alive. Pointers: queries [n_slots, q_pad] and totals
    [n_slots, v_pad] in chunks, states [n_slots], the largest scores, and sums of weights [n_slots, 16]; what each row
    of the item sees [64, 2] (first position and end); products [2, 64, 16], weights [2, 64], addresses of rows
    [2, 2, 64] (keys and values of this block and the next).
    """
    q_pad, v_pad = padded(d_head), padded(d_value)
    floats = np.empty(n_slots * (q_pad + v_pad + 17) + 2 * BLOCK * 17 + 32, np.float32)
    longs = np.empty(4 * BLOCK + 2 * ITEM_ROWS, np.int64)
    # A vector that straddles two cache lines costs twice.
    products = float_pointer(on_line(floats.ctypes.data))
    weights = shifted(products, 2 * BLOCK * 16)
    queries = shifted(weights, 2 * BLOCK)
    totals = shifted(queries, n_slots * q_pad)
    sums = shifted(totals, n_slots * v_pad)
    states = shifted(sums, n_slots * 16)
    rows = long_pointer(longs.ctypes.data)
    return floats, longs, (queries, totals, states, sums, shifted(rows, 4 * BLOCK), products, weights, rows)


@inlined
def attend(a: Any, place: Any, lanes: Any, stores: Any, memory: Any) -> None:
    """One block of a head's keys and values for the lanes that see it, two at a time.

    The arguments: see `attend_item`.
    """
    (span, (block, _)), following, exist, turn = (place[0], place[1]), place[2], place[3], place[4]
    first_row, end_row, n_rows, first_slot = lanes
    seen, group = memory[4], a[N_HEADS] // a[N_KV]
    keys, values = stores[1], stores[2]
    rows, rows_next = shifted(memory[7], turn * 2 * BLOCK), shifted(memory[7], (1 - turn) * 2 * BLOCK)
    _locate(a, (span, following[1]), (keys, values), (following[0], exist), rows_next)
    for lane in range(first_row * group, end_row * group, 2):
        row, row_next = lane // group, min(lane + 1, n_rows * group - 1) // group
        pair = first_slot + lane, of_block(seen, row, block), of_block(seen, row_next, block)
        if lane == first_row * group:
            _pair(a, pair, (rows, keys, values), memory, rows_next)
        else:
            _pair(a, pair, (rows, keys, values), memory, None)


@inlined
def _pair(a: Any, pair: Any, block: Any, memory: Any, following: Any) -> None:
    """One block for the lanes in slots `slot` and slot + 1.

    pair: (slot, what it sees, what the next sees), first and end each; the next may not see any of the block yet.
    block: (addresses of key and value rows, pointers of their kinds).
    """
    slot, (first, end), (first_next, end_next) = pair
    rows, keys, values = block
    queries, totals, states, sums, _, products, weights, _ = memory
    d_value, q_pad, v_pad = a[D_VALUE], padded(a[D_HEAD]), padded(a[D_VALUE])
    state, addresses = (shifted(states, slot), shifted(sums, slot * 16)), shifted(rows, BLOCK)
    # Values are fetched while keys are read, and the next block's keys while values are, so that no more than half a
    # block waits in the cache for its turn.
    mine = None if following is None else (addresses, np.int64(0), d_value)
    score(shifted(queries, slot * q_pad), q_pad, (rows, keys), a[D_HEAD], products, mine)
    factor, factor_next = soften(products, (first, end), state, weights), splat(np.float32(1))
    if first_next < BLOCK:
        state_next = shifted(states, slot + 1), shifted(sums, (slot + 1) * 16)
        products_next, weights_next = shifted(products, BLOCK * 16), shifted(weights, BLOCK)
        factor_next = soften(products_next, (first_next, end_next), state_next, weights_next)
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
    d_value, v_pad = a[D_VALUE], padded(a[D_VALUE])
    slot, weights = lane
    for column in range(0, d_value, CHUNK):
        total = shifted(totals, slot * v_pad + column)
        gather_rest(weights, (rows[0], column, rows[1]), positions, total, d_value - column)


@inlined
def start(a: Any, item: Any, stores: Any, place: Any) -> None:
    """Copy the item's queries, scaled, in the order in which chunks of keys lie, and empty its totals.

    A head's lanes, row × group + head of the group, lie in neighbouring slots; one more keeps the last company.
    """
    span, begin, end, head_begin, head_end = item
    memory, exist, first_block = place
    q, keys = stores[0], stores[1]
    _locate(a, (span, head_begin), (keys, stores[2]), (first_block, exist), memory[7])
    queries, totals, states, sums = memory[0], memory[1], memory[2], memory[3]
    group, d_head, q_pad, v_pad = a[N_HEADS] // a[N_KV], a[D_HEAD], padded(a[D_HEAD]), padded(a[D_VALUE])
    scale, zero = splat(np.float32(double_of(a[SCALE]))), splat(np.float32(0))
    n_lanes = (end - begin) * group
    slot = 0
    for head in range(head_begin, head_end):
        for i in range(n_lanes + 1):
            lane = min(i, n_lanes - 1)
            row = shifted(q, ((begin + lane // group) * a[N_HEADS] + head * group + lane % group) * d_head)
            for d in range(0, d_head, CHUNK):
                at = slot * q_pad + d
                store(queries, at, scale * load_low_as(row, d, d_head - d, keys))
                store(queries, at + 16, scale * load_high_as(row, d, d_head - d, keys))
            for at in range(slot * v_pad, (slot + 1) * v_pad, 16):
                store(totals, at, zero)
            store(sums, slot * 16, zero)
            states[slot] = LEAST
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
def end() -> None:
    """Nothing to give up."""


BY_VECTORS = (1, 1), scratch, start, attend, end
