"""The inner loops of MLA on CPU: blocks of 64 latents, laid out once for all heads, multiplied as weights are.

A lane is one head of one row. All lanes of a pass read the same latents, so a block is packed as `matmul` packs a
weight, twice: latents as outputs for the scores, positions as inputs for the sums; then two products serve an item's
lanes at the rate of `matmul`. A lane's sums run in ascending order of inputs and positions, blocks lie at fixed
positions, so how many lanes are computed together does not change a bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from slipstream.kernels.compiled import (
    address_of,
    double_of,
    emits,
    float_pointer,
    inlined,
    int_pointer,
    long_pointer,
    on_line,
    pointer_like,
    shifted,
)
from slipstream.kernels.exponential import exp
from slipstream.kernels.matmul.formats import PANEL
from slipstream.kernels.matmul.panel_sums import add_by_floats, add_by_pairs
from slipstream.kernels.vector import (
    FLOATS,
    INTS,
    VECTOR,
    WIDTH,
    at_element,
    constant,
    first_lane,
    fma,
    keep_below,
    larger,
    load,
    load_four,
    load_part,
    load_vector,
    max_lanes,
    splat,
    store,
    store_four,
    store_part,
    sum_lanes,
)

BLOCK = 64  # positions of a block: outputs of a panel
MOST_LANES = 64  # of an item: more need more scratch memory, fewer pack blocks more often
SLACK = 3  # rows that products write beyond the last
LEAST = np.float32(-np.inf)
# The int64 arguments of a task; SCALE holds the bits of a float64, NEXT is the next item, shared by the threads.
Q, Q_ROPE, LATENTS, OUT, STARTS, PAST, TABLE = range(7)
N_SPANS, N_TABLE, N_HEADS, PAGE, D_LATENT, D_ROPE, LANES, N_ITEMS, NEXT, SCALE = range(7, 17)


@inlined
def items_of(a: Any, n_rows: int) -> int:
    """Items that a span of n_rows rows makes."""
    n_items: int = (n_rows * a[N_HEADS] + a[LANES] - 1) // a[LANES]
    return n_items


@inlined
def scratch(a: Any) -> Any:
    """Memory of one thread: (floats, longs, pointers into them); keep the arrays alive.

    Pointers: keys, a panel [n_steps, 64]; values, panels [n_panels, n_steps, 64]; scores [lanes, 64]; weights
    [lanes, 64] of the queries' kind; totals [n_panels, lanes, 64]; states [lanes, 2] (largest score, sum of weights);
    rows [64, d_latent + d_rope] of the queries' kind, for stores of another; addresses [64].
    """
    lanes, d = a[LANES] + SLACK, a[D_LATENT] + a[D_ROPE]
    n_panels = (a[D_LATENT] + PANEL - 1) // PANEL
    n_keys, n_values = (d + WIDTH) * PANEL, n_panels * BLOCK * PANEL
    sizes = n_keys, n_values, lanes * BLOCK, lanes * BLOCK, n_panels * lanes * PANEL, 2 * lanes, BLOCK * d
    floats = np.empty(sum(sizes) + WIDTH, np.float32)
    longs = np.empty(BLOCK, np.int64)
    keys = float_pointer(on_line(floats.ctypes.data))
    values = shifted(keys, sizes[0])
    scores = shifted(values, sizes[1])
    weights = shifted(scores, sizes[2])
    totals = shifted(weights, sizes[3])
    states = shifted(totals, sizes[4])
    rows = shifted(states, sizes[5])
    return (
        floats,
        longs,
        (keys, values, scores, weights, totals, states, rows, long_pointer(longs.ctypes.data)),
    )


@inlined
def attend_lanes(a: Any, item: Any, stores: Any, out: Any, work: Any) -> None:
    """Attention of lanes (first, end) of a span, counted row by row, heads within.

    item: (span, (first, end)). stores: (q, latents), typed. work: (pointers of `scratch`, BY_PAIRS or BY_FLOATS).
    """
    span, (begin, end) = item
    memory, (at_once, add, lay_values) = work
    keys, values, scores, weights, totals, states, _, addresses = memory
    n_heads, d_latent, lanes = a[N_HEADS], a[D_LATENT], a[LANES] + SLACK
    n_panels = (d_latent + PANEL - 1) // PANEL
    steps, steps_rope, steps_block = d_latent // at_once, a[D_ROPE] // at_once, BLOCK // at_once
    past = np.int64(int_pointer(a[PAST])[span])
    lane0 = np.int64(int_pointer(a[STARTS])[span]) * n_heads + begin
    q = shifted(float_pointer(a[Q]), lane0 * steps)
    q_rope = shifted(float_pointer(a[Q_ROPE]), lane0 * steps_rope)
    last = past + (end - 1) // n_heads
    n, zero = end - begin, splat(np.float32(0))
    for i in range(0, n_panels * lanes * PANEL, WIDTH):
        store(totals, i, zero)
    for lane in range(n):
        states[2 * lane], states[2 * lane + 1] = LEAST, np.float32(0)
    for block in range(0, last + 1, BLOCK):
        first = max(0, (block - past) * n_heads - begin)  # lanes of rows before the block do not see it
        _locate(a, span, (block, last), stores, memory)
        for i in range(0, steps + steps_rope, WIDTH):
            for rows in range(0, BLOCK, WIDTH):
                left = steps + steps_rope - i
                lay_across(shifted(addresses, rows), 4 * i, left, shifted(keys, i * PANEL + rows))
        for i in range(first * BLOCK, n * BLOCK, WIDTH):
            store(scores, i, zero)
        sums = shifted(scores, first * BLOCK)
        add((shifted(q, first * steps), n - first, steps), keys, sums)
        rest = shifted(keys, steps * PANEL)
        add((shifted(q_rope, first * steps_rope), n - first, steps_rope), rest, sums)
        for lane in range(first, n):
            seen = past + (begin + lane) // n_heads - block + 1
            _soften(a, (lane, seen), stores[0], memory)
        for panel in range(n_panels):
            of_panel = shifted(values, panel * steps_block * PANEL)
            lay_values(addresses, (panel * PANEL, d_latent), stores[0], of_panel)
            mixed = shifted(totals, (panel * lanes + first) * PANEL)
            shares = shifted(weights, first * steps_block), n - first, steps_block
            add(shares, of_panel, mixed)
    _finish(a, (lane0, n), out, memory)


@inlined
def _locate(a: Any, span: int, positions: Any, stores: Any, memory: Any) -> None:
    """Addresses of a block's latents; places behind the last repeat it. positions: (first of the block, last seen).

    Latents of another kind than the queries' are copied in that kind.
    """
    block, last = positions
    q, latents = stores
    copies, addresses = pointer_like(address_of(memory[6]), q), memory[7]
    page_size, d = a[PAGE], a[D_LATENT] + a[D_ROPE]
    table = shifted(int_pointer(a[TABLE]), span * a[N_TABLE])
    for i in range(BLOCK):
        position = min(block + i, last)
        page = np.int64(table[position // page_size])
        row = shifted(latents, (page * page_size + position % page_size) * d)
        if is_same_kind(q, latents):
            addresses[i] = address_of(row)
        else:
            copy = shifted(copies, i * d)
            if block + i <= last:
                for j in range(0, d, WIDTH):
                    store_part(copy, j, load_part(row, j, d - j), d - j)
                addresses[i] = address_of(copy)
            else:
                addresses[i] = addresses[i - 1]


@inlined
def _soften(a: Any, lane_seen: Any, like: Any, memory: Any) -> None:
    """A lane's scores of a block become weights, and what it had summed is brought to the new largest score.

    lane_seen: (lane, positions of the block that its row sees, at least 1). like: pointer of the weights' kind.
    """
    lane, seen = lane_seen
    scores, totals, state = memory[2], memory[4], shifted(memory[5], 2 * lane)
    weights = pointer_like(address_of(memory[3]), like)
    lanes, zero, scale = a[LANES] + SLACK, splat(np.float32(0)), splat(np.float32(double_of(a[SCALE])))
    s0, s1, s2, s3 = load_four(scores, lane * BLOCK)
    least = splat(LEAST)
    s0, s1 = keep_below(seen, s0 * scale, least), keep_below(seen - 16, s1 * scale, least)
    s2, s3 = keep_below(seen - 32, s2 * scale, least), keep_below(seen - 48, s3 * scale, least)
    before, largest = state[0], max_lanes(larger(larger(s0, s1), larger(s2, s3)))
    if before > largest:
        largest = before
    at = splat(largest)
    p0, p1 = keep_below(seen, exp(s0 - at), zero), keep_below(seen - 16, exp(s1 - at), zero)
    p2, p3 = keep_below(seen - 32, exp(s2 - at), zero), keep_below(seen - 48, exp(s3 - at), zero)
    store_four(weights, lane * BLOCK, (p0, p1, p2, p3))
    factor = exp(splat(before) - at)
    state[0] = largest
    state[1] = sum_lanes(fma(splat(state[1]), keep_below(1, factor, zero), (p0 + p1) + (p2 + p3)))
    if first_lane(factor) != np.float32(1):
        for panel in range((a[D_LATENT] + PANEL - 1) // PANEL):
            sums = shifted(totals, (panel * lanes + lane) * PANEL)
            t0, t1, t2, t3 = load_four(sums, 0)
            store_four(sums, 0, (t0 * factor, t1 * factor, t2 * factor, t3 * factor))


@inlined
def _finish(a: Any, which: Any, out: Any, memory: Any) -> None:
    """Divide by the sums of weights and write the lanes. which: (first lane of all, how many)."""
    lane0, n = which
    d, lanes = a[D_LATENT], a[LANES] + SLACK
    for lane in range(n):
        total, row = splat(memory[5][2 * lane + 1]), shifted(out, (lane0 + lane) * d)
        for i in range(0, d, WIDTH):
            at = (i // PANEL * lanes + lane) * PANEL + i % PANEL
            store_part(row, i, load(memory[4], at) / total, d - i)


@emits(types.boolean)
def is_same_kind(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Whether two pointers are to elements of one kind; known when a kernel is compiled."""
    return ir.Constant(ir.IntType(1), int(a.type == b.type))


# One round of the transposition: rows i and i + 8 become rows 2 i and 2 i + 1, their elements in turn.
_LOW = [x for i in range(8) for x in (i, i + WIDTH)]
_HIGH = [x + 8 for x in _LOW]


@emits(types.void)
def lay_across(builder: ir.IRBuilder, addresses: Any, start: Any, count: Any, target: Any) -> None:
    """Words (of four bytes) of 16 rows, one row in a lane: target[word, row] with 64 words between.

    addresses: of the rows, [16]. start: bytes before the first word. count: words that there are; 16 are written.
    """
    long = ir.IntType(64)
    rows = []
    for i in range(WIDTH):
        address = builder.load(builder.gep(addresses, [long(i)]))
        place = builder.inttoptr(builder.add(address, start), INTS.as_pointer())
        rows.append(load_vector(builder, place, count))
    for _ in range(4):
        rows = [
            builder.shuffle_vector(rows[i], rows[i + 8], ir.Constant(INTS, take))
            for i in range(8)
            for take in (_LOW, _HIGH)
        ]
    for i, row in enumerate(rows):
        place = builder.bitcast(builder.gep(target, [long(i * PANEL)]), INTS.as_pointer())
        builder.store(row, place, align=4)


@emits(VECTOR)
def paired(builder: ir.IRBuilder, first: Any, second: Any, index: Any, count: Any) -> Any:
    """Elements index … of two rows of bfloat16, those of one column in one lane; 0 from `count` on."""
    low, high = (
        builder.zext(load_vector(builder, at_element(builder, row, index), count), INTS)
        for row in (first, second)
    )
    return builder.bitcast(builder.or_(low, builder.shl(high, constant(16))), FLOATS)


@inlined
def _lay_pairs(addresses: Any, columns: Any, like: Any, target: Any) -> None:
    """64 columns of a block as weights, [32, 64, 2]: inputs are positions. columns: (first, end of all)."""
    begin, end = columns
    for position in range(0, BLOCK, 2):
        first, second = pointer_like(addresses[position], like), pointer_like(addresses[position + 1], like)
        for i in range(0, PANEL, WIDTH):
            left = end - begin - i
            store(target, position // 2 * PANEL + i, paired(first, second, begin + i, left))


@inlined
def _lay_floats(addresses: Any, columns: Any, like: Any, target: Any) -> None:
    """The same of float32, [64, 64]."""
    begin, end = columns
    for position in range(BLOCK):
        row = pointer_like(addresses[position], like)
        for i in range(0, PANEL, WIDTH):
            store(target, position * PANEL + i, load_part(row, begin + i, end - begin - i))


# Inputs of a step, how a step is multiplied, how values are laid out.
BY_PAIRS = 2, add_by_pairs, _lay_pairs
BY_FLOATS = 1, add_by_floats, _lay_floats
