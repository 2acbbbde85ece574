"""The gated delta rule on CPU: token by token, in compiled code.

An item of work is one span and one key head with its value heads. Nothing in a state or a row depends on what else
is in the pass: every column of a state is a chain of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels import threads
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
from slipstream.kernels.gated_delta import reference, walk
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.gated_delta.state import DeltaGate, DeltaState

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)
SERIAL_BELOW = 500_000  # elements of states times updates; less is not worth waking another thread for


def gated_delta(
    mixed: Tensor,
    raw_decay: Tensor,
    raw_beta: Tensor,
    gate: DeltaGate,
    state: DeltaState,
    spans: RecurrentRows,
) -> Tensor:
    n_value_heads, d_value = state.parked_deltas.shape[1:]
    out = torch.empty((mixed.shape[0], n_value_heads, d_value), dtype=mixed.dtype)
    raw_decay, raw_beta = (x.to(torch.float32).contiguous() for x in (raw_decay, raw_beta))  # exact
    if not raw_decay.shape[1:] == gate.dt_bias.shape == state.parked_decays.shape[1:]:
        raise ValueError("raw_decay, dt_bias and parked_decays disagree on what decays by itself")
    rows = mixed.contiguous(), raw_decay, raw_beta, out, gate.a_log, gate.dt_bias
    _start(rows, state, spans, mixed.dtype)
    return out


def settle_states(states: Tensor, state: DeltaState, spans: RecurrentRows) -> None:
    if states.dtype == torch.float32:
        _start((states,) * 6, state, spans, torch.float32)  # without rows the first six are not read
    else:
        reference.settle_states(states, state, spans)  # the same operations


def _start(rows: tuple[Tensor, ...], state: DeltaState, spans: RecurrentRows, dtype: torch.dtype) -> None:
    """Check what is taken by its address, and run."""
    states = state.state, state.parked_keys, state.parked_deltas, state.parked_decays
    if not all(x.dtype == torch.float32 and x.is_contiguous() for x in (*states, *rows[4:])):
        raise ValueError("states, records and the gate's weights are contiguous float32")
    n_key_heads, d_key = state.parked_keys.shape[1:]
    n_value_heads, d_value = state.parked_deltas.shape[1:]
    _run(
        tuple(x.data_ptr() for x in (*rows, *states)),
        tuple(x.data_ptr() for x in spans.checked()),
        (
            spans.slot_ids.shape[0],
            n_key_heads,
            n_value_heads,
            d_key,
            d_value,
            int(state.parked_decays.dim() == 3),
        ),
        _task[dtype],
        threads.available(),
    )


@long_kernel
def _run(tensors: Any, batch: Any, shape: Any, task: int, n_threads: int) -> None:
    """Count the work and start the threads. tensors, batch, shape: the arguments up to PER_KEY, in that order."""
    memory = np.empty(walk.N_ARGUMENTS, np.int64)
    memory[:10], memory[10:16], memory[16:22] = tensors, batch, shape
    a = long_pointer(memory.ctypes.data)
    n_spans = shape[0]
    starts, history = int_pointer(a[walk.STARTS]), int_pointer(a[walk.HISTORY_STARTS])
    n_updates = starts[n_spans] - starts[0] + history[n_spans] - history[0]
    if n_updates * a[walk.N_VALUE_HEADS] * a[walk.D_KEY] * a[walk.D_VALUE] < SERIAL_BELOW:
        n_threads = 1
    a[walk.N_ITEMS], a[walk.NEXT] = n_spans * a[walk.N_KEY_HEADS], 0
    threads.run(task, memory.ctypes.data, min(n_threads, a[walk.N_ITEMS]))
    memory[0] = 0  # keeps the memory alive until here


@inlined
def _take_items(a: Any, rows: Any) -> None:
    """Do items until none is left. rows: (mixed, out), typed."""
    floats, memory = walk.scratch(a[walk.D_KEY], a[walk.D_VALUE])
    item = fetch_add(shifted(a, walk.NEXT), 1)
    while item < a[walk.N_ITEMS]:
        walk.walk_item(a, item // a[walk.N_KEY_HEADS], item % a[walk.N_KEY_HEADS], rows, memory)
        item = fetch_add(shifted(a, walk.NEXT), 1)
    floats[0] = 0  # keeps the memory alive until here


@per_dtype
def _task(kind: Any) -> int:
    """Address of the compiled task for rows of that kind."""

    def items(address: int) -> None:
        a = long_pointer(address)
        _take_items(a, (pointer(a[walk.MIXED], kind), pointer(a[walk.OUT], kind)))

    return threads.compile_task(items)
