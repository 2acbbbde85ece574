"""top_k and top_p in compiled code, without a sort: `reference.survivors` again, bit for bit.

A row is read in segments of 256 tokens. What survives is described by a cut (value, token id): larger logits than
the value, and equal ones up to that id. The cut is found by counting tokens, or adding up their masses, in buckets of
equal distance from the largest logit, and then exactly among the tokens of the one bucket it falls into.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.choose import mass
from slipstream.kernels.compiled import bits_of, float_pointer, inlined, int_pointer, routine
from slipstream.kernels.vector import (
    WIDTH,
    at_least,
    first_lane,
    floor,
    keep_below,
    larger,
    load_part,
    max_lanes,
    power_of_whole,
    smaller,
    splat,
    store,
    store_whole,
)

SEGMENT = 256
N_BUCKETS = 2048
PER_UNIT = np.float32(
    64
)  # buckets per unit of logit: finer makes them too few for the range, coarser too full
LAST_BUCKET = np.float32(N_BUCKETS - 1)
LEAST = np.float32(-np.inf)
LOG2E, LEAST_LOG2 = np.float32(mass.LOG2E), np.float32(mass.LEAST_LOG2)
MASS_ONE = np.float32(mass.MASS_ONE)
C6, C5, C4, C3, C2, C1, C0 = (np.float32(c) for c in mass.POWER_OF_2)
DIGITS = 11  # bits that one round of the exact search settles; three rounds are 33


@inlined
def weights(distance: Any) -> Any:
    """`mass.weights` of 16 lanes. No multiply-add is fused, as in the definition."""
    y = larger(splat(LEAST_LOG2), distance * splat(LOG2E))
    whole = floor(y)
    f = y - whole
    power = splat(C6) * f + splat(C5)
    power = power * f + splat(C4)
    power = power * f + splat(C3)
    power = power * f + splat(C2)
    power = power * f + splat(C1)
    power = power * f + splat(C0)
    return power * power_of_whole(whole)


@inlined
def mass_of(weight: Any) -> int:
    """`mass.masses` from a weight."""
    return int(weight * MASS_ONE)


@inlined
def logits(row: Any, i: int, n: int) -> Any:
    """16 logits from token i on; -inf beyond the last of n."""
    return keep_below(n - i, load_part(row, i, n - i), splat(LEAST))


@inlined
def scan(row: Any, n: int, peaks: Any) -> Any:
    """(largest of n logits, whether none is NaN). peaks: [n_segments] float32, gets the largest of every segment."""
    largest, all_lanes = LEAST, np.int64(2**WIDTH - 1)
    numbers = all_lanes
    for segment in range(len(peaks)):
        top = splat(LEAST)
        for i in range(segment * SEGMENT, min((segment + 1) * SEGMENT, n), WIDTH):
            part = logits(row, i, n)
            numbers &= at_least(part, part)
            top = larger(top, part)
        peaks[segment] = max_lanes(top)
        largest = max(largest, peaks[segment])
    return largest, numbers == all_lanes


@inlined
def survives(logit: Any, token: int, cut: Any) -> bool:
    """Whether a cut (value, token id) keeps that token."""
    kept: bool = logit > cut[0] or (logit == cut[0] and token <= cut[1])
    return kept


@inlined
def _buckets(distance: Any) -> Any:
    """Bucket of 16 distances (≤ 0) from the largest logit, as whole float32."""
    return smaller(splat(LAST_BUCKET), floor(distance * splat(-PER_UNIT)))


@inlined
def _measure(source: Any, segment: int, work: Any) -> int:
    """Weights and buckets of a segment's tokens, into work; returns how many it has."""
    row, n, _, largest = source
    for i in range(0, SEGMENT, WIDTH):
        distance = logits(row, segment * SEGMENT + i, n) - splat(largest)
        store(float_pointer(work[0].ctypes.data), i, weights(distance))
        store_whole(int_pointer(work[1].ctypes.data), i, _buckets(distance))
    n_left: int = n - segment * SEGMENT
    return min(SEGMENT, n_left)


@routine
def find_cut(source: Any, top_k: int, top_p: float, cut: Any, work: Any) -> Any:
    """The cut that keeps top_k tokens of those `cut` keeps, or, with top_k 0, the fewest whose mass reaches top_p.

    source: (row, n, peaks, largest). cut: (float32, int). work: see `new_work`.
    """
    row, _, peaks, largest = source
    weight, bucket, counts, tokens, amounts = work
    counts[:] = 0
    for segment in range(len(peaks)):
        if peaks[segment] >= cut[0]:
            for i in range(_measure(source, segment, work)):
                token = segment * SEGMENT + i
                if survives(row[token], token, cut):
                    counts[bucket[i]] += 1 if top_k > 0 else mass_of(weight[i])
    need = top_k if top_k > 0 else max(1, int(np.ceil(top_p * np.float64(counts.sum()))))
    full = 0
    while counts[full] < need:
        need -= counts[full]
        full += 1
    n_found = 0
    for segment in range(len(peaks)):
        if (
            first_lane(_buckets(splat(np.float32(peaks[segment] - largest)))) <= full
            and peaks[segment] >= cut[0]
        ):
            for i in range(_measure(source, segment, work)):
                token = segment * SEGMENT + i
                if bucket[i] == full and survives(row[token], token, cut):
                    tokens[n_found] = token
                    amounts[n_found] = 1 if top_k > 0 else mass_of(weight[i])
                    n_found += 1
    return _reach(row, n_found, need, work)


@inlined
def _rank(logit: Any) -> int:
    """32 bits that grow as the logit falls; both zeros give the same."""
    bits = int(bits_of(np.float32(logit + np.float32(0))))
    return bits ^ 0x7FFFFFFF if bits >= 0 else bits & 0xFFFFFFFF


@inlined
def _reach(row: Any, n_found: int, need: int, work: Any) -> Any:
    """The found token, larger logits first and equal ones by id, at which the sum of amounts reaches `need`."""
    _, _, counts, tokens, amounts = work
    prefix = 0
    for shift in (2 * DIGITS, DIGITS, 0):
        counts[:] = 0
        for j in range(n_found):
            rank = _rank(row[tokens[j]])
            if rank >> (shift + DIGITS) == prefix:
                counts[(rank >> shift) & (N_BUCKETS - 1)] += amounts[j]
        digit = 0
        while counts[digit] < need:
            need -= counts[digit]
            digit += 1
        prefix = prefix << DIGITS | digit
    last = 0
    for j in range(n_found):
        if _rank(row[tokens[j]]) == prefix and need > 0:
            need -= amounts[j]
            last = j
    return row[tokens[last]], np.int64(tokens[last])


@routine
def row_mass(source: Any, work: Any) -> int:
    """Mass of all tokens of a row."""
    total = 0
    for segment in range(len(source[2])):
        n_here = _measure(source, segment, work)
        for i in range(n_here):
            total += mass_of(work[0][i])
    return total


@inlined
def new_work(n: int) -> Any:
    """Memory for one thread: weights and buckets of a segment, counts, found tokens and their amounts."""
    return (
        np.empty(SEGMENT, np.float32),
        np.empty(SEGMENT, np.int32),
        np.empty(N_BUCKETS, np.int64),
        np.empty(n, np.int32),
        np.empty(n, np.int64),
    )
