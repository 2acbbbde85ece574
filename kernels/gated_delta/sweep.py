"""Passes over the rows of a state, 64 columns at a time.

A column's arithmetic is the same in whatever block it falls. `count` is the number of columns of a block that is not
full, else None.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.compiled import inlined
from slipstream.kernels.vector import fma, load_four, load_part, splat, store_four, store_part

COLUMNS = 64


@inlined
def four(pointer: Any, at: Any, count: Any) -> Any:
    """Elements at … at + 63; with a count, those below it and 0 for the rest."""
    if count is None:
        return load_four(pointer, at)
    return (
        load_part(pointer, at, count),
        load_part(pointer, at + 16, count - 16),
        load_part(pointer, at + 32, count - 32),
        load_part(pointer, at + 48, count - 48),
    )


@inlined
def put_four(pointer: Any, at: Any, values: Any, count: Any) -> None:
    """Write what `four` reads."""
    if count is None:
        store_four(pointer, at, values)
    else:
        store_part(pointer, at, values[0], count)
        store_part(pointer, at + 16, values[1], count - 16)
        store_part(pointer, at + 32, values[2], count - 32)
        store_part(pointer, at + 48, values[3], count - 48)


@inlined
def weigh(rows: Any, stride: Any, weights: Any, d_key: int, count: Any) -> Any:
    """Σ_i weights[i] * row i: even rows ascending, odd rows ascending, then their sum."""
    zero = splat(np.float32(0))
    e0, e1, e2, e3 = zero, zero, zero, zero
    o0, o1, o2, o3 = zero, zero, zero, zero
    for i in range(0, d_key - 1, 2):
        even, odd = splat(weights[i]), splat(weights[i + 1])
        r0, r1, r2, r3 = four(rows, i * stride, count)
        e0, e1, e2, e3 = fma(even, r0, e0), fma(even, r1, e1), fma(even, r2, e2), fma(even, r3, e3)
        r0, r1, r2, r3 = four(rows, (i + 1) * stride, count)
        o0, o1, o2, o3 = fma(odd, r0, o0), fma(odd, r1, o1), fma(odd, r2, o2), fma(odd, r3, o3)
    if d_key % 2:
        even = splat(weights[d_key - 1])
        r0, r1, r2, r3 = four(rows, (d_key - 1) * stride, count)
        e0, e1, e2, e3 = fma(even, r0, e0), fma(even, r1, e1), fma(even, r2, e2), fma(even, r3, e3)
    return e0 + o0, e1 + o1, e2 + o2, e3 + o3


@inlined
def moved(rows: Any, at: Any, decay: Any, key: Any, delta: Any, count: Any) -> Any:
    """decay * row + key * delta, each product and the sum rounded by itself, as the reference does it.

    Histories are folded with this and rows update with it: that is why the two give the same bits.
    """
    r0, r1, r2, r3 = four(rows, at, count)
    return (
        r0 * decay + key * delta[0],
        r1 * decay + key * delta[1],
        r2 * decay + key * delta[2],
        r3 * decay + key * delta[3],
    )


@inlined
def fold(source: Any, target: Any, vectors: Any, delta: Any, d_key: int, count: Any) -> None:
    """target = decay * source + key ⊗ delta. source, target: (pointer, stride). vectors: (keys, decays)."""
    for i in range(d_key):
        key, decay = splat(vectors[0][i]), splat(vectors[1][i])
        put_four(target[0], i * target[1], moved(source[0], i * source[1], decay, key, delta, count), count)


@inlined
def update(source: Any, target: Any, vectors: Any, delta: Any, d_key: int, count: Any) -> Any:
    """`fold`, and what the query reads from target: Σ_i queries[i] * row i. vectors: (keys, decays, queries)."""
    zero = splat(np.float32(0))
    t0, t1, t2, t3 = zero, zero, zero, zero
    for i in range(d_key):
        key, decay, query = splat(vectors[0][i]), splat(vectors[1][i]), splat(vectors[2][i])
        new = moved(source[0], i * source[1], decay, key, delta, count)
        put_four(target[0], i * target[1], new, count)
        t0, t1 = fma(query, new[0], t0), fma(query, new[1], t1)
        t2, t3 = fma(query, new[2], t2), fma(query, new[3], t3)
    return t0, t1, t2, t3
