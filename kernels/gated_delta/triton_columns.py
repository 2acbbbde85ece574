"""The part of `triton.py` that moves states: one program takes a few columns of one head through a span's updates.

A state is a tuple of chunks [CHUNK, COLUMNS], so that sums over its rows can be fused multiply-adds from chunk to
chunk where an update may not fuse. Vectors over its rows are tuples of [CHUNK, 1].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _vector(at, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, wanted):
    """D elements as a tuple of CHUNKS columns [CHUNK, 1], zeros beyond the end or where not wanted."""
    i = tl.arange(0, CHUNK)[:, None]
    parts = ()
    for c in tl.static_range(CHUNKS):
        parts = parts + (tl.load(at + c * CHUNK + i, mask=wanted & (c * CHUNK + i < D), other=0.0),)
    return parts


@triton.jit
def _decays(at, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PER_KEY: tl.constexpr, wanted):
    """The decays of an update: one per key dimension, or a tuple of the one that serves all."""
    if PER_KEY:
        decays = _vector(at, D, CHUNKS, CHUNK, wanted)
    else:
        decays = (tl.load(at, mask=wanted, other=0.0),)
    return decays


@triton.jit
def _stored(
    at, D_KEY: tl.constexpr, D_VALUE: tl.constexpr, column, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """A program's columns of the state at `at`, zeros beyond its end."""
    i = tl.arange(0, CHUNK)[:, None]
    state = ()
    for c in tl.static_range(CHUNKS):
        inside = (c * CHUNK + i < D_KEY) & (column[None, :] < D_VALUE)
        part = tl.load(at + (c * CHUNK + i) * D_VALUE + column[None, :], mask=inside, other=0.0)
        state = state + (part,)
    return state


@triton.jit
def _decayed(state, decays, CHUNKS: tl.constexpr, PER_KEY: tl.constexpr):
    """decay * state."""
    decayed = ()
    for c in tl.static_range(CHUNKS):
        decayed = decayed + (state[c] * decays[c * PER_KEY],)
    return decayed


@triton.jit
def _moved(state, decays, keys, delta, CHUNKS: tl.constexpr, PER_KEY: tl.constexpr):
    """decay * state + key ⊗ delta, both products and the sum rounded: rows update with it, histories fold with it."""
    decayed = _decayed(state, decays, CHUNKS, PER_KEY)
    moved = ()
    for c in tl.static_range(CHUNKS):
        moved = moved + (decayed[c] + keys[c] * delta[None, :],)
    return moved


@triton.jit
def _weighed(state, weights, CHUNKS: tl.constexpr):
    """Σ_i weights[i] * row i: rows one CHUNK apart ascending, fused, then a tree over the CHUNK sums."""
    total = state[0] * weights[0]
    for c in tl.static_range(1, CHUNKS):
        total = tl.fma(state[c], tl.broadcast_to(weights[c], state[c].shape), total)
    return tl.sum(total, 0)


@triton.jit
def _keep(
    state, at, D_KEY: tl.constexpr, D_VALUE: tl.constexpr, column, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """Write a program's columns of the state. at: the state of its slot and head."""
    i = tl.arange(0, CHUNK)[:, None]
    for c in tl.static_range(CHUNKS):
        inside = (c * CHUNK + i < D_KEY) & (column[None, :] < D_VALUE)
        tl.store(at + (c * CHUNK + i) * D_VALUE + column[None, :], state[c], mask=inside)


@triton.jit
def _put_vector(parts, at, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Write what `_vector` reads."""
    i = tl.arange(0, CHUNK)[:, None]
    for c in tl.static_range(CHUNKS):
        tl.store(at + c * CHUNK + i, parts[c], mask=c * CHUNK + i < D)


# fmt: off
@triton.jit
def _fold(
    state, keys_at, decays_at, deltas_at, history_at, span_at, store_at, n_settled, column,
    N_KEYS: tl.constexpr, N_DECAYS: tl.constexpr, N_VALUES: tl.constexpr, D_KEY: tl.constexpr,
    D_VALUE: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PER_KEY: tl.constexpr,
):
    # fmt: on
    """The state after a span's history, and the length of that. What an update needs is loaded one ahead.

    keys_at, decays_at, deltas_at: those of the program's head and columns. N_...: from one update to the next.
    """
    inside = column < D_VALUE
    begin, end = tl.load(span_at), tl.load(span_at + 1)
    some, place = begin < end, begin.to(tl.int64)
    keys = _vector(keys_at + place * N_KEYS, D_KEY, CHUNKS, CHUNK, some)
    decays = _decays(decays_at + place * N_DECAYS, D_KEY, CHUNKS, CHUNK, PER_KEY, some)
    parked = tl.load(history_at + begin, mask=some, other=0).to(tl.int64)
    delta = tl.load(deltas_at + parked * N_VALUES, mask=inside & some, other=0.0)  # [COLUMNS]
    parked = tl.load(history_at + begin + 1, mask=begin + 1 < end, other=0).to(tl.int64)
    for update in range(begin, end):
        more, place = update + 1 < end, place + 1
        next_keys = _vector(keys_at + place * N_KEYS, D_KEY, CHUNKS, CHUNK, more)
        next_decays = _decays(decays_at + place * N_DECAYS, D_KEY, CHUNKS, CHUNK, PER_KEY, more)
        next_delta = tl.load(deltas_at + parked * N_VALUES, mask=inside & more, other=0.0)
        parked = tl.load(history_at + update + 2, mask=update + 2 < end, other=0).to(tl.int64)
        state = _moved(state, decays, keys, delta, CHUNKS, PER_KEY)
        if update - begin + 1 == n_settled:
            _keep(state, store_at, D_KEY, D_VALUE, column, CHUNKS, CHUNK)
        keys, decays, delta = next_keys, next_decays, next_delta
    return state, end - begin


# fmt: off
@triton.jit
def _park(
    keys, decays, keys_at, decays_at, tile, first_of_group, D_KEY: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, PER_KEY: tl.constexpr,
):
    # fmt: on
    """What one program of a head writes of a record for all of them, and one head of a group for the group."""
    if tile == 0:
        if PER_KEY:
            _put_vector(decays, decays_at, D_KEY, CHUNKS, CHUNK)
        else:
            tl.store(decays_at, decays[0])
        if first_of_group:
            _put_vector(keys, keys_at, D_KEY, CHUNKS, CHUNK)


# fmt: off
@triton.jit(do_not_specialize=["n_history"])
def advance_columns(
    mixed_at, out_at, keys_at, queries_at, decays_at, betas_at, state_at, parked_keys_at, parked_deltas_at,
    parked_decays_at, starts_at, slots_at, history_starts_at, history_at, settled_at, parks_at, n_history,
    N_KEY: tl.constexpr, N_VALUE: tl.constexpr, D_KEY: tl.constexpr, D_VALUE: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, PER_KEY: tl.constexpr,
):
    # fmt: on
    """All updates of one span to COLUMNS columns of one head's state. n_history: of all spans."""
    tile, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    N_KEYS: tl.constexpr = N_KEY * D_KEY
    N_DECAYS: tl.constexpr = N_VALUE * D_KEY if PER_KEY else N_VALUE
    N_VALUES: tl.constexpr = N_VALUE * D_VALUE
    N_MIXED: tl.constexpr = 2 * N_KEYS + N_VALUES
    key_head, own_decay = head // (N_VALUE // N_KEY), head * D_KEY if PER_KEY else head
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside, own_value = column < D_VALUE, head * D_VALUE + column  # [COLUMNS]
    keys_at, queries_at = keys_at + key_head * D_KEY, queries_at + key_head * D_KEY
    decays_at, betas_at = decays_at + own_decay, betas_at + head
    deltas_at, values_at = parked_deltas_at + own_value, mixed_at + 2 * N_KEYS + own_value  # [COLUMNS]
    state_at += (tl.load(slots_at + span).to(tl.int64) * N_VALUE + head) * (D_KEY * D_VALUE)
    n_settled, first = tl.load(settled_at + span), head % (N_VALUE // N_KEY) == 0
    state = _stored(state_at, D_KEY, D_VALUE, column, CHUNKS, CHUNK)
    # fmt: off
    state, n_done = _fold(
        state, keys_at, decays_at, deltas_at, history_at, history_starts_at + span, state_at,
        n_settled, column, N_KEYS, N_DECAYS, N_VALUES, D_KEY, D_VALUE, CHUNKS, CHUNK, PER_KEY,
    )
    # fmt: on
    tl.debug_barrier()  # the last of a history is read before a row parks over it

    begin, end = tl.load(starts_at + span), tl.load(starts_at + span + 1)
    some, row, place = begin < end, begin.to(tl.int64), (begin + n_history).to(tl.int64)
    keys = _vector(keys_at + place * N_KEYS, D_KEY, CHUNKS, CHUNK, some)
    queries = _vector(queries_at + row * N_KEYS, D_KEY, CHUNKS, CHUNK, some)
    decays = _decays(decays_at + place * N_DECAYS, D_KEY, CHUNKS, CHUNK, PER_KEY, some)
    value = tl.load(values_at + row * N_MIXED, mask=inside & some, other=0.0).to(tl.float32)  # [COLUMNS]
    beta = tl.load(betas_at + row * N_VALUE, mask=some, other=0.0)
    for _ in range(begin, end):
        more, park = row + 1 < end, tl.load(parks_at + row).to(tl.int64)
        next_keys = _vector(keys_at + (place + 1) * N_KEYS, D_KEY, CHUNKS, CHUNK, more)
        next_decays = _decays(decays_at + (place + 1) * N_DECAYS, D_KEY, CHUNKS, CHUNK, PER_KEY, more)
        next_queries = _vector(queries_at + (row + 1) * N_KEYS, D_KEY, CHUNKS, CHUNK, more)
        next_value = tl.load(values_at + (row + 1) * N_MIXED, mask=inside & more, other=0.0)
        next_beta = tl.load(betas_at + (row + 1) * N_VALUE, mask=more, other=0.0)

        decayed = _decayed(state, decays, CHUNKS, PER_KEY)
        delta = beta * (value - _weighed(decayed, keys, CHUNKS))  # [COLUMNS]
        state = _moved(state, decays, keys, delta, CHUNKS, PER_KEY)
        read = _weighed(state, queries, CHUNKS).to(out_at.dtype.element_ty)
        tl.store(out_at + row * N_VALUES + own_value, read, mask=inside)
        n_done += 1
        if n_done == n_settled:
            _keep(state, state_at, D_KEY, D_VALUE, column, CHUNKS, CHUNK)
        if park >= 0:
            tl.store(deltas_at + park * N_VALUES, delta, mask=inside)
            record_at = parked_keys_at + park * N_KEYS + key_head * D_KEY
            decay_at = parked_decays_at + park * N_DECAYS + own_decay
            _park(keys, decays, record_at, decay_at, tile, first, D_KEY, CHUNKS, CHUNK, PER_KEY)
        keys, decays, queries, beta = next_keys, next_decays, next_queries, next_beta
        value, row, place = next_value.to(tl.float32), row + 1, place + 1
