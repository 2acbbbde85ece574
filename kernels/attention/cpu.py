"""Attention on CPU: pages are walked in compiled code, a block of 64 positions at a time.

A row's arithmetic is the same whatever is computed beside it: blocks lie at fixed positions, sums run over
dimensions and over positions in ascending order, one fused multiply-add at a time, or in the order of AMX's tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.attention import by_tiles, walk
from slipstream.kernels.attention.by_tiles import BY_TILES
from slipstream.kernels.attention.by_vectors import BY_VECTORS
from slipstream.kernels.attention.spans import Spans, check_attention, check_batch
from slipstream.kernels.attention.walk import ITEM_ROWS
from slipstream.kernels.compiled import (
    fetch_add,
    inlined,
    int_pointer,
    long_kernel,
    long_pointer,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.compiled import refuses as refuses

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)
SERIAL_BELOW = 200_000  # multiply-adds; less is done before a second thread has begun


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Spans,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    check_attention(q, values, spans, window, sinks)
    check_batch(spans, q, keys, values)
    (n_rows, n_heads, d_head), d_value, wholes = q.shape, values.shape[3], spans.wholes
    if keys.dtype != values.dtype or keys.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise ValueError(f"attention of {q.dtype} over {keys.dtype} and {values.dtype} is not there")
    if d_head % 2 or d_value % 2:
        raise ValueError(f"attention takes even widths of heads, not {d_head} and {d_value}")
    in_tiles = q.dtype == keys.dtype == torch.bfloat16 and by_tiles.takes(d_head, d_value, keys.shape[2])
    out = torch.empty((n_rows, n_heads * d_value), dtype=q.dtype)
    _run(
        (
            *(q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()),
            0 if sinks is None else sinks.data_ptr(),
            0 if wholes is None else wholes.data_ptr(),
        ),
        (spans.span_starts.data_ptr(), spans.n_past.data_ptr(), spans.page_table.data_ptr()),
        (*spans.page_table.shape, n_heads, *keys.shape[1:], d_value, window or walk.NO_WINDOW),
        scale,
        _task[q.dtype, keys.dtype, "tiles" if in_tiles else "vectors"],
        threads.available(),
    )
    return out


@long_kernel
def _run(tensors: Any, batch: Any, shape: Any, scale: float, task: int, n_threads: int) -> None:
    """Count the work and start the threads. tensors, batch, shape: the arguments up to WINDOW, in that order."""
    memory = np.empty(walk.SCALE + 1, np.int64)
    memory[: walk.STARTS], memory[walk.STARTS : walk.N_SPANS] = tensors, batch
    memory[walk.N_SPANS : walk.N_THREADS] = shape
    memory[walk.SCALE :].view(np.float64)[0] = scale
    a = long_pointer(memory.ctypes.data)
    starts, past = int_pointer(batch[0]), int_pointer(batch[1])
    work = 0
    for i in range(shape[0]):
        n_rows = starts[i + 1] - starts[i]
        work += n_rows * min(past[i] + n_rows, a[walk.WINDOW])
    if work * a[walk.N_HEADS] * (a[walk.D_HEAD] + a[walk.D_VALUE]) < SERIAL_BELOW:
        n_threads = 1
    a[walk.N_THREADS] = n_threads
    n_items = 0
    for i in range(shape[0]):
        n_items += _items_of(a, starts[i + 1] - starts[i])
    a[walk.N_ITEMS], a[walk.NEXT] = n_items, 0
    threads.run(task, memory.ctypes.data, min(n_threads, n_items))
    memory[0] = 0  # keeps the memory alive until here


@inlined
def _items_of(a: Any, n_rows: int) -> int:
    """Items that a span of n_rows rows makes."""
    heads = walk.heads_per_item(a, n_rows)
    n_parts: int = (a[walk.N_KV] + heads - 1) // heads
    return (n_rows + ITEM_ROWS - 1) // ITEM_ROWS * n_parts


@inlined
def _take_items(a: Any, stores: Any, out: Any, way: Any) -> None:
    """Do items until none is left. a: the arguments; the typed pointers: stores (q, keys, values) and out."""
    filling, scratch, start, attend, end = way
    starts, n_kv, group = int_pointer(a[walk.STARTS]), a[walk.N_KV], a[walk.N_HEADS] // a[walk.N_KV]
    n_slots = 0
    for i in range(a[walk.N_SPANS]):
        n_rows = starts[i + 1] - starts[i]
        n_slots = max(
            n_slots, walk.slots_of(min(n_rows, ITEM_ROWS) * group, filling) * walk.heads_per_item(a, n_rows)
        )
    floats, longs, memory = scratch(n_slots, a[walk.D_HEAD], a[walk.D_VALUE])
    item = fetch_add(shifted(a, walk.NEXT), 1)
    before = span = 0  # items of the spans before `span`
    while item < a[walk.N_ITEMS]:
        n_rows = starts[span + 1] - starts[span]
        n_here = _items_of(a, n_rows)
        if item - before >= n_here:
            before += n_here
            span += 1
            continue
        heads = walk.heads_per_item(a, n_rows)
        # A head's rows one after the other, so that its keys and values stay in a cache; the last see most.
        n_parts = (n_rows + ITEM_ROWS - 1) // ITEM_ROWS
        begin = starts[span] + (n_here - 1 - item + before) % n_parts * ITEM_ROWS
        head = (item - before) // n_parts * heads
        rows = span, begin, min(begin + ITEM_ROWS, starts[span + 1]), head, min(head + heads, n_kv)
        walk.attend_item(a, rows, stores, out, (memory, filling, start, attend))
        item = fetch_add(shifted(a, walk.NEXT), 1)
    end()
    floats[0], longs[0] = 0, 0  # keeps the memory alive until here


@per_dtype
def _task(kind: Any, stored_kind: Any, way: str) -> int:
    """Address of the compiled task for queries and stores of these kinds, "tiles" or "vectors"."""

    def items(address: int) -> None:
        a = long_pointer(address)
        keys, values = pointer(a[walk.KEYS], stored_kind), pointer(a[walk.VALUES], stored_kind)
        stores, out = (pointer(a[walk.Q], kind), keys, values), pointer(a[walk.OUT], kind)
        if way == "tiles":  # decided as the task is compiled
            _take_items(a, stores, out, BY_TILES)
        else:
            _take_items(a, stores, out, BY_VECTORS)

    return threads.compile_task(items)
