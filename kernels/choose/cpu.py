"""`choose` on CPU: each row alone in compiled code, rows spread over threads; the same tokens as the reference."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import threads
from kernels.choose.draw import largest_token, pick
from kernels.choose.params import COLUMNS, LEAST_TEMPERATURE, Choice, RowParams
from kernels.choose.truncate import LEAST, SEGMENT, find_cut, mass_of, new_work, row_mass, scan, weights
from kernels.compiled import (
    fetch_add,
    float_pointer,
    inlined,
    int_pointer,
    long_kernel,
    long_pointer,
    shifted,
)
from kernels.vector import first_lane, splat

SERIAL_BELOW = 100_000  # logits in all rows; less is done before a second thread has woken
LOGITS, N_ROWS, VOCAB, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, TOKENS, PROBABILITY, NEXT = range(12)


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def choose(logits: Tensor, params: RowParams, *, want_probability: bool = False) -> Choice:
    n_rows, vocab = logits.shape
    wide = logits.to(torch.float32).contiguous()
    token_ids = torch.empty(n_rows, dtype=torch.int64)
    probability = torch.empty(n_rows, dtype=torch.float32) if want_probability else None
    columns = [getattr(params, name) for name in COLUMNS]
    for column, dtype in zip(columns, COLUMNS.values(), strict=True):
        if column.dtype != dtype or not column.is_contiguous() or column.shape != (n_rows,):
            raise ValueError("row parameters are contiguous, one per row, of the types RowParams names")
    _run(
        (wide.data_ptr(), n_rows, vocab),
        tuple(column.data_ptr() for column in columns),
        (token_ids.data_ptr(), 0 if probability is None else probability.data_ptr()),
        _task(),
        threads.available() if n_rows * vocab >= SERIAL_BELOW else 1,
    )
    return Choice(token_ids, probability)


@long_kernel
def _run(shape: Any, columns: Any, results: Any, task: int, n_threads: int) -> None:
    """Start the threads; the arguments are those of the task, in order."""
    memory = np.empty(NEXT + 1, np.int64)
    memory[:3], memory[3:9], memory[9:11], memory[NEXT] = shape, columns, results, 0
    threads.run(task, memory.ctypes.data, min(n_threads, shape[1]))
    memory[0] = 0  # keeps the memory alive until here


def _rows(address: int) -> None:
    """Do rows until none is left."""
    a = long_pointer(address)
    n = a[VOCAB]
    peaks, work = np.empty((n + SEGMENT - 1) // SEGMENT, np.float32), new_work(n)
    i = fetch_add(shifted(a, NEXT), 1)
    while i < a[N_ROWS]:
        _row(a, i, peaks, work)
        i = fetch_add(shifted(a, NEXT), 1)


@inlined
def _row(a: Any, i: int, peaks: Any, work: Any) -> None:
    row, n = shifted(float_pointer(a[LOGITS]), i * a[VOCAB]), a[VOCAB]
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
