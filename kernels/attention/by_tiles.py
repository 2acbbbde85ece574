"""Attention of bfloat16 in the tiles of AMX (`amx.py`): sixteen lanes at a time (a lane is a row's query head).

Keys are the left side of a product as they lie in their page, so scores come out a position a row, and are turned.
Weights, rounded to bfloat16 as GPUs' kernels round them, are the left side of the next, and values the right side as
they lie: a word of a tile holds the values of two neighbouring columns, and beside each weight there is a zero, which
leaves one of the two out. No sum of a tile depends on its other rows, so a lane's bits do not depend on other lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.amx import HAS_TILES, configure, load, multiply, release, store, zero
from slipstream.kernels.attention import vectors
from slipstream.kernels.attention.walk import (
    BLOCK,
    D_HEAD,
    D_VALUE,
    ITEM_ROWS,
    KEYS,
    LEAST,
    N_HEADS,
    N_KV,
    N_TABLE,
    PAGE,
    SCALE,
    TABLE,
    VALUES,
    of_block,
    slots_of,
)
from slipstream.kernels.attention.words import all_finite, alone_low, largest_halves, round_half_up, turn
from slipstream.kernels.chunk import CHUNK
from slipstream.kernels.compiled import (
    address_of,
    double_of,
    float_pointer,
    inlined,
    int_pointer,
    long_pointer,
    on_line,
    prefetch,
    routine,
    shifted,
)
from slipstream.kernels.exponential import LOG2E, coarse_exp2, exp
from slipstream.kernels.vector import fma, larger, max_lanes, splat, store_four
from slipstream.kernels.vector import load as load_floats
from slipstream.kernels.vector import store as store_floats

LANES = 16  # of a tile
FILLING = LANES - 1, LANES  # a head has whole tiles (`slots_of`)
LINE = 64  # bytes: a tile's row
WORDS = 2 * BLOCK  # of a lane: a weight and 0, then 0 and the weight, of 16 positions each
NOTHING = np.int64(0), np.int64(0)  # to be fetched: (address, lines of the cache)
COLUMNS = 64  # of values at once: four tiles of sums
# Weights are relative to a score that no later one exceeds by more: totals are scaled seldom.
SLACK = np.float32(8)


def takes(d_head: int, d_value: int, page_size: int) -> bool:
    """Whether heads of such widths lie in whole tiles, and blocks in one page each."""
    return HAS_TILES and d_head % CHUNK == 0 and d_value % COLUMNS == 0 and page_size % BLOCK == 0


@inlined
def scratch(n_slots: int, d_head: int, d_value: int) -> Any:
    """Memory of one thread for items of up to n_slots slots.

    (floats, longs, pointers into them): keep the arrays alive. Pointers: queries, by tiles of lanes [d_head / 2, 16]
    words; totals [n_slots, d_value] in chunks; states [n_slots], what weights are relative to; sums of weights
    [n_slots, 16]; what each row of the item sees [64, 2] (first position and end); scores [64, 16], then turned
    [4, 16, 16]; weights [n_slots, 128] words; values [64, d_value]; totals of a tile [16, d_value].
    """
    n_words = n_slots * (d_head // 2 + d_value + WORDS + LANES + 1) + BLOCK * LANES + BLOCK * (d_value // 2)
    floats = np.empty(n_words + LANES * d_value + 16, np.float32)
    longs = np.empty(2 * ITEM_ROWS, np.int64)
    queries = float_pointer(on_line(floats.ctypes.data))
    totals = shifted(queries, n_slots * (d_head // 2))
    scores = shifted(totals, n_slots * d_value)
    weights = shifted(scores, BLOCK * LANES)
    values = shifted(weights, n_slots * WORDS)
    spare = shifted(values, BLOCK * (d_value // 2))
    sums = shifted(spare, LANES * d_value)
    states = shifted(sums, n_slots * LANES)
    seen = long_pointer(longs.ctypes.data)
    return floats, longs, (queries, totals, states, sums, seen, scores, weights, values, spare)


@inlined
def start(a: Any, item: Any, stores: Any, place: Any) -> None:
    """Lay the item's queries out, two inputs of sixteen lanes in a row, and empty its totals.

    Its first keys are fetched meanwhile.
    """
    span, begin, end, head_begin, head_end = item
    memory, exist, first_block = place
    queries, totals, states, sums = memory[0], memory[1], memory[2], memory[3]
    n_heads, d_head, d_value = a[N_HEADS], a[D_HEAD], a[D_VALUE]
    n_lines = min(exist[1] + 1 - first_block, BLOCK) * d_head // (LINE // 2)
    _fetch((_place(a, (span, first_block, head_begin))[0], n_lines), 0, n_lines)
    group = n_heads // a[N_KV]
    q, n_lanes, none = address_of(stores[0]), (end - begin) * group, splat(np.float32(0))
    tile_words = LANES * (d_head // 2)
    configure(np.int64(LANES), np.int64(CHUNK))
    first_slot = 0
    for head in range(head_begin, head_end):
        row, member = begin, 0
        for lane in range(n_lanes):
            own = float_pointer(q + ((row * n_heads) + head * group + member) * d_head * 2)
            slot = first_slot + lane
            tile = shifted(queries, slot // LANES * tile_words)
            for d in range(0, d_head // 2, LANES):
                store_floats(tile, (d + lane % LANES) * LANES, load_floats(own, d))
            for d in range(0, d_value, LANES):
                store_floats(totals, slot * d_value + d, none)
            store_floats(sums, slot * LANES, none)
            states[slot] = LEAST
            member += 1
            if member == group:
                row, member = row + 1, 0
        end_slot = first_slot + slots_of(n_lanes, FILLING)
        for at in range(first_slot // LANES * tile_words, end_slot // LANES * tile_words, LANES * LANES):
            turn(shifted(queries, at))
        first_slot = end_slot


@inlined
def end() -> None:
    """Give the tiles up."""
    release()


@inlined
def attend(a: Any, place: Any, lanes: Any, stores: Any, memory: Any) -> None:
    """One block of a head's keys and values for the lanes that see it. The arguments: see `attend_item`."""
    span, (block, head), (block_next, head_next), exist = place[0], place[1], place[2], place[3]
    first_row, end_row, n_rows, first_slot = lanes
    queries, totals, seen, scores, weights = memory[0], memory[1], memory[4], memory[5], memory[6]
    group, d_head, d_value = a[N_HEADS] // a[N_KV], a[D_HEAD], a[D_VALUE]
    rows = first_row, end_row, block
    keys, values = _place(a, (span, block, head))
    own = max(exist[0] - block, 0), min(exist[1] + 1 - block, BLOCK)
    keys_next = values_next = np.int64(0)
    n_next = min(max(exist[1] + 1 - block_next, 0), BLOCK)
    if n_next > 0:
        keys_next, values_next = _place(a, (span, block_next, head_next))
    # Memory should never wait: what is read next is fetched all the time, a quarter of the values in the block before.
    quarter = own[1] * d_value // (LINE // 2) // 4
    beside_scores, beside_weights = (
        (values + quarter * LINE, 2 * quarter),
        (values + 3 * quarter * LINE, quarter),
    )
    beside_totals = (
        (keys_next, n_next * d_head // (LINE // 2)),
        (values_next, n_next * d_value // (LINE // 2) // 4),
    )
    # Whether some row does not see all that others see of it, or, as before an image, nothing.
    partly = seen[2 * (end_row - 1)] > block + own[0] or seen[2 * first_row + 1] < block + own[1]
    partly = partly or end_row - first_row < n_rows
    finite, used = True, values
    first_lane = first_row * group // LANES * LANES
    for lane in range(first_lane, end_row * group, LANES):
        slot = first_slot + lane
        _score(shifted(queries, slot * (d_head // 2)), (keys, own[1], d_head), scores, beside_scores)
        if lane == first_lane and (partly or own[0] > 0 or own[1] < BLOCK):
            finite = _is_finite(values, own[1], d_value)
            if not finite:  # perhaps in places that nobody sees
                used = address_of(memory[7])
                _copy(values, (own, d_value), memory[7])
                finite = _is_finite(used, own[1], d_value)
        _soften(a, (slot, lane, n_rows * group), rows, memory, beside_weights)
        if finite:
            total = shifted(totals, slot * d_value)
            _gather(shifted(weights, slot * WORDS), (used, own[1], d_value), (total, total), beside_totals)
        else:
            _gather_each(a, (slot, lane, n_rows * group), rows, values, memory)
        beside_scores = beside_weights = NOTHING
        beside_totals = NOTHING, NOTHING


@inlined
def _place(a: Any, where: Any) -> Any:
    """Addresses of the keys and the values of a head's block, which lies in one page. where: (span, block, head)."""
    span, block, head = where
    page = int_pointer(a[TABLE])[span * a[N_TABLE] + block // a[PAGE]]
    row = (page * a[N_KV] + head) * a[PAGE] + block % a[PAGE]
    return a[KEYS] + row * a[D_HEAD] * 2, a[VALUES] + row * a[D_VALUE] * 2


@inlined
def _share(beside: Any, n: int) -> int:
    """Lines of each of n shares of what is to be fetched; the last may be short."""
    share: int = (beside[1] + n - 1) // n
    return share


@inlined
def _fetch(beside: Any, i: int, share: int) -> None:
    """Bring the i-th share of some lines nearer. beside: (address, lines)."""
    address, n_lines = beside
    for line in range(i * share, min((i + 1) * share, n_lines)):
        prefetch(address + line * LINE)


@routine
def _score(queries: Any, keys: Any, scores: Any, beside: Any) -> None:
    """scores[position, lane] = products of a tile of queries with keys. keys: (address, positions, d_head)."""
    address, n, d_head = keys
    row_bytes, n_chunks, x, out = d_head * 2, d_head // CHUNK, address_of(queries), address_of(scores)
    share = _share(beside, n_chunks)
    zero(0)
    zero(1)
    zero(2)
    zero(3)
    for k in range(n_chunks):
        at = address + k * LINE
        load(5, x + k * LANES * LINE, np.int64(LINE))
        load(4, at, row_bytes)
        multiply(0, 5)
        _fetch(beside, k, share)
        if n > 16:
            load(4, at + 16 * row_bytes, row_bytes)
            multiply(1, 5)
        if n > 32:
            load(4, at + 32 * row_bytes, row_bytes)
            multiply(2, 5)
        if n > 48:
            load(4, at + 48 * row_bytes, row_bytes)
            multiply(3, 5)
    store(0, out, np.int64(LINE))
    store(1, out + 16 * LINE, np.int64(LINE))
    store(2, out + 32 * LINE, np.int64(LINE))
    store(3, out + 48 * LINE, np.int64(LINE))


@routine
def _is_finite(values: int, n: int, d_value: int) -> bool:
    """Whether all values of n positions at that address are finite, and those up to the end of their tile."""
    words = float_pointer(values)
    sizes = splat(np.float32(0))
    for at in range(0, (n + LANES - 1) // LANES * LANES * (d_value // 2), 16):
        sizes = largest_halves(sizes, load_floats(words, at))
    return all_finite(sizes)


@routine
def _copy(values: int, form: Any, target: Any) -> None:
    """Copy a block's values, with 0 for positions outside `own`. values: address. form: (own, d_value)."""
    own, d_value = form
    for position in range((own[1] + LANES - 1) // LANES * LANES):
        row = float_pointer(values + position * d_value * 2)
        for d in range(0, d_value // 2, 16):
            x = splat(np.float32(0))
            if own[0] <= position < own[1]:
                x = load_floats(row, d)
            store_floats(target, position * (d_value // 2) + d, x)


@routine
def _soften(a: Any, tile: Any, rows: Any, memory: Any, beside: Any) -> None:
    """weights[lane, position] of a tile's lanes from their scores; scales totals where what they are relative to rose.

    tile: (first slot, first lane, lanes there are). rows: (first, end) that see the block, and where it begins.
    """
    slot, first_lane, end_lane = tile
    first_row, end_row, block = rows
    totals, states, sums, seen, scores, weights = (
        memory[1],
        memory[2],
        memory[3],
        memory[4],
        memory[5],
        memory[6],
    )
    group, d_value, scale = a[N_HEADS] // a[N_KV], a[D_VALUE], np.float32(double_of(a[SCALE]))
    share = _share(beside, BLOCK // LANES)
    for i in range(0, BLOCK * LANES, LANES * LANES):
        _fetch(beside, i // (LANES * LANES), share)
        turn(shifted(scores, i))
    nothing, none = splat(LEAST), splat(np.float32(0))
    row, member = first_lane // group, first_lane % group
    for lane in range(min(end_lane - first_lane, LANES)):
        place = slot + lane
        out = shifted(weights, place * WORDS)
        if first_row <= row < end_row:
            of_row = of_block(seen, row, block)
            own = shifted(scores, lane * LANES)
            s0, s1 = load_floats(own, 0), load_floats(own, 256)
            s2, s3 = load_floats(own, 512), load_floats(own, 768)
            if of_row[0] > 0 or of_row[1] < BLOCK:
                s0, s1 = vectors.only(of_row, 0, s0, nothing), vectors.only(of_row, 16, s1, nothing)
                s2, s3 = vectors.only(of_row, 32, s2, nothing), vectors.only(of_row, 48, s3, nothing)
            most = max_lanes(larger(larger(s0, s1), larger(s2, s3))) * scale
            total = load_floats(sums, place * LANES)
            if most > states[place] + SLACK:
                factor = exp(splat(states[place] - most))
                for d in range(place * d_value, (place + 1) * d_value, 16):
                    store_floats(totals, d, load_floats(totals, d) * factor)
                total = total * factor
                states[place] = most
            by, at = splat(scale * LOG2E), splat(np.float32(0) - states[place] * LOG2E)
            p0, p1 = round_half_up(coarse_exp2(fma(s0, by, at))), round_half_up(coarse_exp2(fma(s1, by, at)))
            p2, p3 = round_half_up(coarse_exp2(fma(s2, by, at))), round_half_up(coarse_exp2(fma(s3, by, at)))
            store_floats(sums, place * LANES, total + ((p0 + p1) + (p2 + p3)))
            store_four(out, 0, (alone_low(p0), p0, alone_low(p1), p1))
            store_four(out, 64, (alone_low(p2), p2, alone_low(p3), p3))
        else:
            store_four(out, 0, (none, none, none, none))
            store_four(out, 64, (none, none, none, none))
        member += 1
        if member == group:
            member = 0
            row += 1


@routine
def _gather(weights: Any, values: Any, totals: Any, beside: Any) -> None:
    """totals[lane] + weights · values for a tile's lanes.

    values: (address, positions, d_value). totals: (before, after). beside: twice what to fetch.
    """
    address, n, d_value = values
    row_bytes, n_parts, w = d_value * 4, d_value // COLUMNS, address_of(weights)
    shares = _share(beside[0], n_parts * (BLOCK // LANES)), _share(beside[1], n_parts)
    for part in range(n_parts):
        column = part * 4 * LINE
        before, after = address_of(totals[0]) + column, address_of(totals[1]) + column
        load(0, before, row_bytes)
        load(1, before + LINE, row_bytes)
        load(2, before + 2 * LINE, row_bytes)
        load(3, before + 3 * LINE, row_bytes)
        _fetch(beside[1], part, shares[1])
        for k in range((n + LANES - 1) // LANES):
            at = address + k * LANES * d_value * 2 + part * 2 * LINE
            _fetch(beside[0], part * (BLOCK // LANES) + k, shares[0])
            # A word holds values of an even column and the next, and weights have zero for one of them.
            load(4, w + 2 * k * LINE, np.int64(WORDS * 4))
            load(5, at, d_value * 2)
            multiply(0, 5)
            load(6, at + LINE, d_value * 2)
            multiply(2, 6)
            load(4, w + (2 * k + 1) * LINE, np.int64(WORDS * 4))
            multiply(1, 5)
            multiply(3, 6)
        store(0, after, row_bytes)
        store(1, after + LINE, row_bytes)
        store(2, after + 2 * LINE, row_bytes)
        store(3, after + 3 * LINE, row_bytes)


@routine
def _gather_each(a: Any, tile: Any, rows: Any, values: int, memory: Any) -> None:
    """The same for a block of which some rows do not see values that are not finite: each lane by what it sees."""
    slot, first_lane, end_lane = tile
    first_row, end_row, block = rows
    weights, copied, spare = shifted(memory[6], slot * WORDS), memory[7], memory[8]
    group, d_value = a[N_HEADS] // a[N_KV], a[D_VALUE]
    total = shifted(memory[1], slot * d_value)
    for lane in range(min(end_lane - first_lane, LANES)):
        row = (first_lane + lane) // group
        if first_row <= row < end_row:
            own = of_block(memory[4], row, block)
            _copy(values, (own, d_value), copied)
            _gather(weights, (address_of(copied), own[1], d_value), (total, spare), (NOTHING, NOTHING))
            for d in range(lane * d_value, (lane + 1) * d_value, 16):
                store_floats(total, d, load_floats(spare, d))


BY_TILES = FILLING, scratch, start, attend, end
