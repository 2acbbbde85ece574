"""`choose` on CPU: each row alone in compiled code, rows spread over threads; the same tokens as the reference."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.choose.change import edit, entries_of, forbid, line_of
from slipstream.kernels.choose.draw import largest_token, pick
from slipstream.kernels.choose.row_params import (
    LEAST_TEMPERATURE,
    Choice,
    Edits,
    Masks,
    RowParams,
    edit_columns,
    mask_columns,
    row_columns,
)
from slipstream.kernels.choose.truncate import (
    LEAST,
    SEGMENT,
    find_cut,
    mass_of,
    new_work,
    row_mass,
    scan,
    weights,
)
from slipstream.kernels.compiled import (
    fetch_add,
    float_pointer,
    inlined,
    int_pointer,
    long_kernel,
    long_pointer,
    shifted,
)
from slipstream.kernels.vector import first_lane, splat

SERIAL_BELOW = 100_000  # logits in all rows; less is done before a second thread has woken
LOGITS, N_ROWS, VOCAB, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION = range(9)
EDITS, MASKS = 9, 14  # columns of `Edits`; those of `Masks`, n_words
TOKENS, PROBABILITY, CHANGED, NEXT, N_STARTED = range(17, 22)
NO_EDITS, NO_MASKS = (0,) * 5, (0,) * 3
_kept = threading.local()  # .rows: see _memory


def choose(
    logits: Tensor,
    params: RowParams,
    edits: Edits | None = None,
    masks: Masks | None = None,
    *,
    want_probability: bool = False,
) -> Choice:
    n_rows, vocab = logits.shape
    wide = logits.to(torch.float32).contiguous()
    token_ids = torch.empty(n_rows, dtype=torch.int64)
    probability = torch.empty(n_rows, dtype=torch.float32) if want_probability else None
    n_threads = min(threads.available() if n_rows * vocab >= SERIAL_BELOW else 1, n_rows)
    changed = None if edits is None and masks is None else _memory(n_threads * vocab)
    _run(
        (wide.data_ptr(), n_rows, vocab),
        _addresses(row_columns(params, n_rows)),
        NO_EDITS if edits is None else _addresses(edit_columns(edits, n_rows)),
        NO_MASKS
        if masks is None
        else (*_addresses(mask_columns(masks, n_rows, vocab)), masks.allowed.shape[1]),
        tuple([0 if one is None else one.data_ptr() for one in (token_ids, probability, changed)]),
        (_task(), n_threads),
    )
    return Choice(token_ids, probability)


def _addresses(columns: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple([column.data_ptr() for column in columns])


def _memory(n: int) -> Tensor:
    """For changed rows, [n] float32 at least: kept by the calling thread, as new pages cost more than a copy."""
    if not hasattr(_kept, "rows") or len(_kept.rows) < n:
        _kept.rows = torch.empty(n, dtype=torch.float32)
    rows: Tensor = _kept.rows
    return rows


@long_kernel
def _run(shape: Any, columns: Any, edits: Any, masks: Any, results: Any, work: Any) -> None:
    """Start the threads. work: (task, number of threads); the arguments before it are those of the task, in order."""
    memory = np.empty(N_STARTED + 1, np.int64)
    memory[:TEMPERATURE], memory[TEMPERATURE:EDITS], memory[EDITS:MASKS] = shape, columns, edits
    memory[MASKS:TOKENS], memory[TOKENS:NEXT], memory[NEXT:] = masks, results, 0
    threads.run(work[0], memory.ctypes.data, work[1])
    memory[0] = 0  # keeps the memory alive until here


def _rows(address: int) -> None:
    """Do rows until none is left."""
    a = long_pointer(address)
    n = a[VOCAB]
    peaks, work = np.empty((n + SEGMENT - 1) // SEGMENT, np.float32), new_work(n)
    changed = shifted(float_pointer(a[CHANGED]), fetch_add(shifted(a, N_STARTED), 1) * n)
    i = fetch_add(shifted(a, NEXT), 1)
    while i < a[N_ROWS]:
        _row(a, i, _given(a, i, changed), peaks, work)
        i = fetch_add(shifted(a, NEXT), 1)


@inlined
def _given(a: Any, i: int, changed: Any) -> Any:
    """Row i as it is to be picked from: where it has entries or a mask, a copy in `changed` [vocab]."""
    n, edits, masks = a[VOCAB], shifted(a, EDITS), shifted(a, MASKS)
    row, span, line = shifted(float_pointer(a[LOGITS]), i * n), entries_of(edits, i), line_of(masks, i)
    if span[0] == span[1] and line < 0:
        return row
    for j in range(n):
        changed[j] = row[j]
    edit(changed, n, edits, span)
    if line >= 0:
        forbid(changed, n, masks, line)
    return changed


@inlined
def _row(a: Any, i: int, row: Any, peaks: Any, work: Any) -> None:
    n = a[VOCAB]
    largest, numbers = scan(row, n, peaks)
    source = row, n, peaks, largest
    token = -1
    if numbers and np.isfinite(largest):
        token = _token(a, i, source, work)
    long_pointer(a[TOKENS])[i] = token
    if a[PROBABILITY] != 0:
        probability = np.float32(0)
        if token >= 0:
            mass = mass_of(first_lane(weights(splat(np.float32(row[token] - largest)))))
            probability = np.float32(np.float64(mass) / np.float64(row_mass(source, work)))
        float_pointer(a[PROBABILITY])[i] = probability


@inlined
def _token(a: Any, i: int, source: Any, work: Any) -> int:
    temperature = float_pointer(a[TEMPERATURE])[i]
    if temperature < LEAST_TEMPERATURE:
        return largest_token(source)
    top_k, top_p = int_pointer(a[TOP_K])[i], np.float64(float_pointer(a[TOP_P])[i])
    cut = LEAST, np.int64(source[1])
    if 0 < top_k < source[1]:
        cut = find_cut(source, top_k, 1.0, cut, work)
    if top_p < 1:
        cut = find_cut(source, 0, top_p, cut, work)
    seed = np.uint64(long_pointer(a[SEED])[i])
    low = np.uint64(0xFFFFFFFF)
    stream = seed & low, seed >> np.uint64(32), np.uint64(long_pointer(a[POSITION])[i]) & low
    return pick(source, cut, float_pointer(a[MIN_P])[i], temperature, stream)


@functools.cache
def _task() -> int:
    """Address of the compiled task."""
    return threads.compile_task(_rows)
