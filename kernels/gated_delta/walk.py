"""All updates of one span to the states of one key head's value heads.

The updates go by in tiles: their vectors are prepared once, then each 64 columns of the state take all updates of the
tile while they are in the first cache. The store is written after update n_settled only; before and after, the state
lives in scratch memory, by blocks of columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.compiled import float_pointer, inlined, int_pointer, on_line, shifted
from slipstream.kernels.exponential import over_one_plus_exp
from slipstream.kernels.gated_delta.prepare import copy, decay, fill, multiply, normalise
from slipstream.kernels.gated_delta.sweep import COLUMNS, fold, four, put_four, update, weigh
from slipstream.kernels.vector import WIDTH, first_lane, load_part, splat, store_part

# Places of the arguments, all int64. OUT and MIXED are of the rows' dtype, other tensors float32 or int32.
MIXED, DECAY, BETA, OUT, A_LOG, DT_BIAS, STATE, KEYS, DELTAS, DECAYS = range(10)
STARTS, SLOTS, HISTORY_STARTS, HISTORY, SETTLED, PARKS = range(10, 16)
N_SPANS, N_KEY_HEADS, N_VALUE_HEADS, D_KEY, D_VALUE, PER_KEY = range(16, 22)
N_ITEMS, NEXT, N_ARGUMENTS = range(22, 25)

TILE = 16  # updates prepared at a time


@inlined
def padded(d_key: int) -> int:
    """Elements of a key vector in whole machine vectors."""
    return (d_key + WIDTH - 1) // WIDTH * WIDTH


@inlined
def scratch(d_key: int, d_value: int) -> Any:
    """Memory of a thread, and pointers into it: (vectors, betas, state), on whole cache lines.

    vectors: [TILE, 4, d_key padded], of each update key, decay, query, key * decay. betas: [TILE].
    state: [d_value / 64 rounded up, d_key, 64].
    """
    n_vectors = TILE * 4 * padded(d_key)
    n_state = (d_value + COLUMNS - 1) // COLUMNS * COLUMNS * d_key
    memory = np.empty(n_vectors + TILE + n_state + WIDTH, np.float32)
    vectors = float_pointer(on_line(memory.ctypes.data))
    betas = shifted(vectors, n_vectors)
    return memory, (vectors, betas, shifted(betas, TILE))


@inlined
def walk_item(a: Any, span: int, key_head: int, rows: Any, memory: Any) -> None:
    """Do the updates of a span to the states under one key head. rows: (mixed, out), typed."""
    n_history = int_pointer(a[HISTORY_STARTS])[span + 1] - int_pointer(a[HISTORY_STARTS])[span]
    n_updates = n_history + int_pointer(a[STARTS])[span + 1] - int_pointer(a[STARTS])[span]
    group, d_value = a[N_VALUE_HEADS] // a[N_KEY_HEADS], a[D_VALUE]
    whole = d_value - d_value % COLUMNS
    for head in range(key_head * group, (key_head + 1) * group):
        for first in range(0, n_updates, TILE):
            tile = first, min(first + TILE, n_updates), n_history
            _prepare(a, (span, key_head, head), tile, rows[0], memory)
            for column in range(0, whole, COLUMNS):
                _advance(a, (span, head, column), tile, rows, memory, None)
            if whole < d_value:
                _advance(a, (span, head, whole), tile, rows, memory, d_value - whole)


@inlined
def _prepare(a: Any, where: Any, tile: Any, mixed: Any, memory: Any) -> None:
    """Vectors of the updates of a tile, (first, end, number that are history). where: (span, key head, head).

    A key's record serves all heads of its group and may overwrite history, so the last head writes it.
    """
    span, key_head, head = where
    first, end, n_history = tile
    d_key, d_pad = a[D_KEY], padded(a[D_KEY])
    history = shifted(int_pointer(a[HISTORY]), int_pointer(a[HISTORY_STARTS])[span])
    last = (head + 1) % (a[N_VALUE_HEADS] // a[N_KEY_HEADS]) == 0
    for t in range(first, end):
        vectors = shifted(memory[0], (t - first) * 4 * d_pad)
        if t < n_history:
            _recall(a, history[t], (key_head, head), vectors)
            continue
        row = int_pointer(a[STARTS])[span] + t - n_history
        heads = shifted(mixed, row * _n_mixed(a))
        keys, queries = vectors, shifted(vectors, 2 * d_pad)
        normalise(
            shifted(heads, key_head * d_key), d_key, np.float32(1) / np.sqrt(np.float32(d_key)), queries
        )
        normalise(shifted(heads, (a[N_KEY_HEADS] + key_head) * d_key), d_key, np.float32(1), keys)
        park = int_pointer(a[PARKS])[row]
        _decays(a, (row, park), head, shifted(vectors, d_pad))
        multiply(keys, shifted(vectors, d_pad), d_key, shifted(vectors, 3 * d_pad))
        raw_beta = splat(float_pointer(a[BETA])[row * a[N_VALUE_HEADS] + head])
        memory[1][t - first] = first_lane(over_one_plus_exp(splat(np.float32(1)), raw_beta))
        if park >= 0 and last:
            record = shifted(float_pointer(a[KEYS]), (park * a[N_KEY_HEADS] + key_head) * d_key)
            for i in range(d_key):
                record[i] = keys[i]


@inlined
def _recall(a: Any, parked: Any, heads: Any, vectors: Any) -> None:
    """Key and decay vectors of a parked row. heads: (key head, value head)."""
    d_key, place = a[D_KEY], parked * a[N_VALUE_HEADS] + heads[1]
    decays = shifted(vectors, padded(d_key))
    copy(shifted(float_pointer(a[KEYS]), (parked * a[N_KEY_HEADS] + heads[0]) * d_key), d_key, vectors)
    if a[PER_KEY]:
        copy(shifted(float_pointer(a[DECAYS]), place * d_key), d_key, decays)
    else:
        fill(splat(float_pointer(a[DECAYS])[place]), d_key, decays)


@inlined
def _decays(a: Any, row: Any, head: int, out: Any) -> None:
    """The decay of every key dimension, and its record. row: (row, place of its record or -1)."""
    d_key, raw, record = a[D_KEY], float_pointer(a[DECAY]), float_pointer(a[DECAYS])
    here, there = row[0] * a[N_VALUE_HEADS] + head, row[1] * a[N_VALUE_HEADS] + head
    a_log, dt_bias = splat(float_pointer(a[A_LOG])[head]), float_pointer(a[DT_BIAS])
    if a[PER_KEY]:
        for i in range(0, d_key, WIDTH):
            n = d_key - i
            decays = decay(
                load_part(raw, here * d_key + i, n), a_log, load_part(dt_bias, head * d_key + i, n)
            )
            store_part(out, i, decays, n)
            if row[1] >= 0:
                store_part(record, there * d_key + i, decays, n)
    else:
        decays = decay(splat(raw[here]), a_log, splat(dt_bias[head]))
        fill(decays, d_key, out)
        if row[1] >= 0:
            record[there] = first_lane(decays)


@inlined
def _advance(a: Any, where: Any, tile: Any, rows: Any, memory: Any, count: Any) -> None:
    """The updates of a tile to one block of columns. where: (span, head, first column). rows: (mixed, out)."""
    span, head, column = where
    first, end, n_history = tile
    d_key, d_value, d_pad = a[D_KEY], a[D_VALUE], padded(a[D_KEY])
    n_settled, start = int_pointer(a[SETTLED])[span], int_pointer(a[STARTS])[span]
    history = shifted(int_pointer(a[HISTORY]), int_pointer(a[HISTORY_STARTS])[span])
    stored = (int_pointer(a[SLOTS])[span] * a[N_VALUE_HEADS] + head) * d_key * d_value + column
    store_block = shifted(float_pointer(a[STATE]), stored), d_value
    own_block = shifted(memory[2], column * d_key), np.int64(COLUMNS)
    deltas = shifted(float_pointer(a[DELTAS]), head * d_value + column)
    for t in range(first, end):
        source = store_block if t == 0 or t == n_settled else own_block
        target = store_block if t == n_settled - 1 else own_block
        keys = shifted(memory[0], (t - first) * 4 * d_pad)
        decays, queries, weights = shifted(keys, d_pad), shifted(keys, 2 * d_pad), shifted(keys, 3 * d_pad)
        if t < n_history:
            delta = four(deltas, history[t] * a[N_VALUE_HEADS] * d_value, count)
            fold(source, target, (keys, decays), delta, d_key, count)
            continue
        row = start + t - n_history
        value = row * _n_mixed(a) + 2 * a[N_KEY_HEADS] * d_key + head * d_value + column
        v0, v1, v2, v3 = four(rows[0], value, count)
        p0, p1, p2, p3 = weigh(source[0], source[1], weights, d_key, count)
        beta = splat(memory[1][t - first])
        delta = beta * (v0 - p0), beta * (v1 - p1), beta * (v2 - p2), beta * (v3 - p3)
        read = update(source, target, (keys, decays, queries), delta, d_key, count)
        put_four(rows[1], (row * a[N_VALUE_HEADS] + head) * d_value + column, read, count)
        park = int_pointer(a[PARKS])[row]
        if park >= 0:
            put_four(deltas, park * a[N_VALUE_HEADS] * d_value, delta, count)


@inlined
def _n_mixed(a: Any) -> int:
    """Elements of a row of `mixed`."""
    width: int = 2 * a[N_KEY_HEADS] * a[D_KEY] + a[N_VALUE_HEADS] * a[D_VALUE]
    return width
