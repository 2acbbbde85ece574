"""The inner loops of CPU attention: one block of positions for a pair of lanes (a lane is a row's query head).

Every accumulator is one chain of fused multiply-adds in ascending order, so that how many lanes or columns are
taken at a time, and where a loop is cut in two, does not change a bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.attention.walk import BLOCK, LEAST
from slipstream.kernels.chunk import CHUNK, load_high, load_high_part, load_low, load_low_part, sum_rows
from slipstream.kernels.compiled import address_of, inlined, pointer_like, prefetch, shifted
from slipstream.kernels.exponential import exp
from slipstream.kernels.vector import (
    IS_WIDE,
    fma,
    keep_below,
    larger,
    load,
    max_lanes,
    splat,
    store,
    store_four,
)


@inlined
def _advance(sums: Any, queries: Any, keys: Any) -> Any:
    """Sums of two lanes × four rows, sixteen dimensions further. queries: (a, b). keys: four vectors."""
    a, b = queries
    k0, k1, k2, k3 = keys
    a0, a1, a2, a3, b0, b1, b2, b3 = sums
    a0, a1, a2, a3 = fma(a, k0, a0), fma(a, k1, a1), fma(a, k2, a2), fma(a, k3, a3)
    b0, b1, b2, b3 = fma(b, k0, b0), fma(b, k1, b1), fma(b, k2, b2), fma(b, k3, b3)
    return a0, a1, a2, a3, b0, b1, b2, b3


@inlined
def _score_four(queries: Any, stride: int, rows: Any, d_head: int, out: Any) -> None:
    """`score` of four rows."""
    addresses, like = rows
    whole, n = d_head - d_head % CHUNK, d_head % CHUNK
    r0, r1 = pointer_like(addresses[0], like), pointer_like(addresses[1], like)
    r2, r3 = pointer_like(addresses[2], like), pointer_like(addresses[3], like)
    zero = splat(np.float32(0))
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    for d in range(0, whole, CHUNK):
        lanes = load(queries, d), load(queries, stride + d)
        sums = _advance(sums, lanes, (load_low(r0, d), load_low(r1, d), load_low(r2, d), load_low(r3, d)))
        lanes = load(queries, d + 16), load(queries, stride + d + 16)
        sums = _advance(sums, lanes, (load_high(r0, d), load_high(r1, d), load_high(r2, d), load_high(r3, d)))
    if n > 0:
        lanes = load(queries, whole), load(queries, stride + whole)
        low = load_low_part(r0, whole, n), load_low_part(r1, whole, n)
        sums = _advance(sums, lanes, (*low, load_low_part(r2, whole, n), load_low_part(r3, whole, n)))
        lanes = load(queries, whole + 16), load(queries, stride + whole + 16)
        high = load_high_part(r0, whole, n), load_high_part(r1, whole, n)
        sums = _advance(sums, lanes, (*high, load_high_part(r2, whole, n), load_high_part(r3, whole, n)))
    store_four(out, 0, sums[:4])
    store_four(out, BLOCK * 16, sums[4:])


@inlined
def _score_two(queries: Any, stride: int, rows: Any, d_head: int, out: Any) -> None:
    """`score` of two rows, whose sums narrow registers hold."""
    addresses, like = rows
    whole, n = d_head - d_head % CHUNK, d_head % CHUNK
    r, s = pointer_like(addresses[0], like), pointer_like(addresses[1], like)
    a0 = a1 = b0 = b1 = splat(np.float32(0))
    for d in range(0, whole, CHUNK):
        a, b, k, j = load(queries, d), load(queries, stride + d), load_low(r, d), load_low(s, d)
        a0, a1, b0, b1 = fma(a, k, a0), fma(a, j, a1), fma(b, k, b0), fma(b, j, b1)
        a, b, k, j = load(queries, d + 16), load(queries, stride + d + 16), load_high(r, d), load_high(s, d)
        a0, a1, b0, b1 = fma(a, k, a0), fma(a, j, a1), fma(b, k, b0), fma(b, j, b1)
    if n > 0:
        a, b = load(queries, whole), load(queries, stride + whole)
        k, j = load_low_part(r, whole, n), load_low_part(s, whole, n)
        a0, a1, b0, b1 = fma(a, k, a0), fma(a, j, a1), fma(b, k, b0), fma(b, j, b1)
        a, b = load(queries, whole + 16), load(queries, stride + whole + 16)
        k, j = load_high_part(r, whole, n), load_high_part(s, whole, n)
        a0, a1, b0, b1 = fma(a, k, a0), fma(a, j, a1), fma(b, k, b0), fma(b, j, b1)
    store(out, 0, a0)
    store(out, 16, a1)
    store(out, BLOCK * 16, b0)
    store(out, BLOCK * 16 + 16, b1)


_score_some, AT_ONCE = (_score_four, 4) if IS_WIDE else (_score_two, 2)


@inlined
def _fetch(following: Any, position: int, like: Any) -> None:
    """Bring a part of a row nearer that is read next, unless there is none. following: as in `score`."""
    if following is not None:
        addresses, first, end = following
        size = address_of(shifted(like, 1)) - address_of(like)  # bytes of an element
        for byte in range(first * size, end * size, 64):
            prefetch(addresses[position] + byte)


@inlined
def score(queries: Any, stride: int, rows: Any, d_head: int, out: Any, following: Any) -> None:
    """Products of two lanes with 64 key rows, as 16 partial sums each: out[lane, position, 16].

    queries: pointer to the first lane's query in chunks, zero beyond d_head; the second is `stride` further.
    rows: (pointer to the rows' addresses, pointer of their kind). following: what to fetch meanwhile, or None: (pointer
    to the addresses of 64 rows, first element, end).
    """
    addresses, like = rows
    for position in range(0, BLOCK, AT_ONCE):
        for i in range(position, position + AT_ONCE):
            _fetch(following, i, like)
        some = shifted(addresses, position), like
        _score_some(queries, stride, some, d_head, shifted(out, position * 16))


@inlined
def only(seen: Any, place: int, value: Any, otherwise: Any) -> Any:
    """`value` in the lanes of positions seen, (first, end); `otherwise` in the rest. Lane 0 is position `place`."""
    ended = keep_below(seen[1] - place, value, otherwise)
    return keep_below(seen[0] - place, otherwise, ended)


@inlined
def soften(products: Any, seen: Any, state: Any, weights: Any) -> Any:
    """weights[position] = exp(score - largest so far) for the positions seen of 64, 0 for the rest.

    products: [64, 16], a score is the sum of its 16. seen: (first, end), at least one. state: (pointers to the largest
    score so far, and to 16 sums that together are that of weights so far), brought up to date. Returns the factor that
    what was gathered before must be multiplied by.
    """
    nothing = splat(LEAST)
    s0 = only(seen, 0, sum_rows(products, 0), nothing)
    s1 = only(seen, 16, sum_rows(products, 256), nothing)
    s2 = only(seen, 32, sum_rows(products, 512), nothing)
    s3 = only(seen, 48, sum_rows(products, 768), nothing)
    most, sums = state
    before = most[0]
    largest = max_lanes(larger(larger(s0, s1), larger(s2, s3)))
    if before > largest:
        largest = before
    at, zero = splat(largest), splat(np.float32(0))
    p0 = only(seen, 0, exp(s0 - at), zero)
    p1 = only(seen, 16, exp(s1 - at), zero)
    p2 = only(seen, 32, exp(s2 - at), zero)
    p3 = only(seen, 48, exp(s3 - at), zero)
    store_four(weights, 0, (p0, p1, p2, p3))
    factor = exp(splat(before) - at)
    most[0] = largest
    store(sums, 0, fma(load(sums, 0), factor, (p0 + p1) + (p2 + p3)))
    return factor


@inlined
def _gather_wide(weights: Any, rows: Any, positions: Any, totals: Any, factors: Any, following: Any) -> None:
    """out = out * factor + weights · value rows, 64 columns of two lanes, positions (first, end).

    weights: [2, 64]. rows: (pointer to addresses, first column, pointer of the rows' kind). totals: (out of the
    first lane, elements to the second's). following: as in `score`.
    """
    addresses, column, like = rows
    out, stride = totals
    f, g = factors
    a0, b0 = load(out, 0) * f, load(out, stride) * g
    a1, b1 = load(out, 16) * f, load(out, stride + 16) * g
    a2, b2 = load(out, 32) * f, load(out, stride + 32) * g
    a3, b3 = load(out, 48) * f, load(out, stride + 48) * g
    for position in range(positions[0], positions[1]):
        _fetch(following, position, like)
        row = shifted(pointer_like(addresses[position], like), column)
        v0, v1, v2, v3 = load_low(row, 0), load_high(row, 0), load_low(row, CHUNK), load_high(row, CHUNK)
        a, b = splat(weights[position]), splat(weights[BLOCK + position])
        a0, a1, a2, a3 = fma(a, v0, a0), fma(a, v1, a1), fma(a, v2, a2), fma(a, v3, a3)
        b0, b1, b2, b3 = fma(b, v0, b0), fma(b, v1, b1), fma(b, v2, b2), fma(b, v3, b3)
    store_four(out, 0, (a0, a1, a2, a3))
    store_four(out, stride, (b0, b1, b2, b3))


@inlined
def gather_narrow(weights: Any, rows: Any, positions: Any, totals: Any, factors: Any, columns: Any) -> None:
    """As `gather` for some columns. columns: (how many, at most 32, and `following`)."""
    addresses, column, like = rows
    out, stride = totals
    f, g = factors
    width, following = columns
    a0, b0 = load(out, 0) * f, load(out, stride) * g
    a1, b1 = load(out, 16) * f, load(out, stride + 16) * g
    for position in range(positions[0], positions[1]):
        _fetch(following, position, like)
        row = pointer_like(addresses[position], like)
        v0, v1 = load_low_part(row, column, width), load_high_part(row, column, width)
        a, b = splat(weights[position]), splat(weights[BLOCK + position])
        a0, a1 = fma(a, v0, a0), fma(a, v1, a1)
        b0, b1 = fma(b, v0, b0), fma(b, v1, b1)
    store(out, 0, a0)
    store(out, 16, a1)
    store(out, stride, b0)
    store(out, stride + 16, b1)


@inlined
def _gather_chunk(weights: Any, rows: Any, positions: Any, totals: Any, factors: Any, following: Any) -> None:
    """The same for 32 columns, whose sums narrow registers hold."""
    gather_narrow(weights, rows, positions, totals, factors, (np.int64(CHUNK), following))


gather, GATHERED = (_gather_wide, 2 * CHUNK) if IS_WIDE else (_gather_chunk, CHUNK)  # columns at once


@inlined
def gather_rest(weights: Any, rows: Any, positions: Any, out: Any, width: int) -> None:
    """out += weights · value rows for `width` columns, at most 32, of one lane, positions (begin, end)."""
    addresses, column, like = rows
    a0, a1 = load(out, 0), load(out, 16)
    for position in range(positions[0], positions[1]):
        row, a = pointer_like(addresses[position], like), splat(weights[position])
        a0 = fma(a, load_low_part(row, column, width), a0)
        a1 = fma(a, load_high_part(row, column, width), a1)
    store(out, 0, a0)
    store(out, 16, a1)
