"""Short convolution on CPU: compiled, one span and some channels at a time, every channel by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.compiled import (
    address_of,
    fetch_add,
    inlined,
    int_pointer,
    long_kernel,
    long_pointer,
    per_dtype,
    pointer,
    pointer_like,
    shifted,
)
from slipstream.kernels.compiled import refuses as refuses
from slipstream.kernels.exponential import over_one_plus_exp
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.short_conv.state import ConvState
from slipstream.kernels.vector import WIDTH, fma, load_part, splat, store_part

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)


# Places of the arguments, all int64.
X, WEIGHT, OUT, WINDOW, PARKED = range(5)
STARTS, SLOTS, HISTORY_STARTS, HISTORY, SETTLED, PARKS = range(5, 11)
N_SPANS, N_CHANNELS, N_WINDOW, STRIDE = range(11, 15)
N_ITEMS, NEXT, N_ARGUMENTS = range(15, 18)

ITEM_CHANNELS = 1024
SERIAL_BELOW = 100_000  # elements; less is not worth waking another thread for


def short_conv(x: Tensor, weight: Tensor, state: ConvState, spans: RecurrentRows) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    columns = weight.T.contiguous()  # [width, n_channels]
    if weight.dtype != x.dtype or columns.shape != (state.window.shape[1] + 1, x.shape[1]):
        raise ValueError("weight must be [n_channels, width] of x's dtype, width one more than the window's")
    out = torch.empty(x.shape, dtype=x.dtype)
    _start((x, columns, out), x.stride(0), state, spans)
    return out


def settle_windows(window: Tensor, state: ConvState, spans: RecurrentRows) -> None:
    _start((window,) * 3, 0, state, spans)  # without rows the first three are not read


def _start(rows: tuple[Tensor, ...], stride: int, state: ConvState, spans: RecurrentRows) -> None:
    """Check what is taken by its address, and run. stride: elements from row to row of x."""
    dtype, (_, n_window, n_channels) = rows[0].dtype, state.window.shape
    state.check(dtype)
    _run(
        tuple(x.data_ptr() for x in (*rows, state.window, state.parked)),
        tuple(x.data_ptr() for x in spans.checked()),
        (spans.slot_ids.shape[0], n_channels, n_window, stride),
        _task[dtype],
        threads.available(),
    )


@long_kernel
def _run(tensors: Any, batch: Any, shape: Any, task: int, n_threads: int) -> None:
    """Start the threads. tensors, batch, shape: the arguments up to STRIDE, in that order."""
    memory = np.empty(N_ARGUMENTS, np.int64)
    memory[:5], memory[5:11], memory[11:15] = tensors, batch, shape
    a = long_pointer(memory.ctypes.data)
    n_spans, n_channels = a[N_SPANS], a[N_CHANNELS]
    if (int_pointer(a[STARTS])[n_spans] - int_pointer(a[STARTS])[0]) * n_channels < SERIAL_BELOW:
        n_threads = 1
    a[N_ITEMS], a[NEXT] = n_spans * _n_parts(a), 0
    threads.run(task, memory.ctypes.data, min(n_threads, a[N_ITEMS]))
    memory[0] = 0  # keeps the memory alive until here


@inlined
def _n_parts(a: Any) -> int:
    """Items that a span makes."""
    n_parts: int = (a[N_CHANNELS] + ITEM_CHANNELS - 1) // ITEM_CHANNELS
    return n_parts


@inlined
def _take_items(a: Any, like: Any) -> None:
    """Do items until none is left. like: a pointer of the rows' kind."""
    sources = np.empty(a[N_WINDOW] + 1, np.int64)
    addresses = long_pointer(sources.ctypes.data)
    item = fetch_add(shifted(a, NEXT), 1)
    while item < a[N_ITEMS]:
        channel = item % _n_parts(a) * ITEM_CHANNELS
        channels = channel, min(channel + ITEM_CHANNELS, a[N_CHANNELS])
        _convolve(a, item // _n_parts(a), channels, addresses, like)
        _keep(a, item // _n_parts(a), channels, like)
        item = fetch_add(shifted(a, NEXT), 1)
    sources[0] = 0  # keeps the memory alive until here


@inlined
def _input(a: Any, span: int, t: int, like: Any) -> Any:
    """Input number t of a span: its window, then its history, then its own rows."""
    history = int_pointer(a[HISTORY_STARTS])
    n_before = a[N_WINDOW] + history[span + 1] - history[span]
    if t < a[N_WINDOW]:
        place = (int_pointer(a[SLOTS])[span] * a[N_WINDOW] + t) * a[N_CHANNELS]
        return shifted(pointer_like(a[WINDOW], like), place)
    if t < n_before:
        row = int_pointer(a[HISTORY])[history[span] + t - a[N_WINDOW]]
        return shifted(pointer_like(a[PARKED], like), row * a[N_CHANNELS])
    return shifted(pointer_like(a[X], like), (int_pointer(a[STARTS])[span] + t - n_before) * a[STRIDE])


@inlined
def _convolve(a: Any, span: int, channels: Any, sources: Any, like: Any) -> None:
    """Outputs of a span's rows. channels: (first, end). sources: [width] int64, memory for addresses."""
    begin, end = int_pointer(a[STARTS])[span], int_pointer(a[STARTS])[span + 1]
    n_history = int_pointer(a[HISTORY_STARTS])[span + 1] - int_pointer(a[HISTORY_STARTS])[span]
    n_channels, width = a[N_CHANNELS], a[N_WINDOW] + 1
    weight = pointer_like(a[WEIGHT], like)
    for row in range(begin, end):
        for j in range(width):
            sources[j] = address_of(_input(a, span, n_history + row - begin + j, like))
        out = shifted(pointer_like(a[OUT], like), row * n_channels)
        for c in range(channels[0], channels[1], WIDTH):
            n, total = channels[1] - c, splat(np.float32(0))
            for j in range(width):
                part = load_part(pointer_like(sources[j], like), c, n)
                total = fma(part, load_part(weight, j * n_channels + c, n), total)
            store_part(out, c, over_one_plus_exp(total, total), n)


@inlined
def _keep(a: Any, span: int, channels: Any, like: Any) -> None:
    """Move the window, then park; by now the outputs have read both. A window is moved from its oldest input on."""
    begin, end = int_pointer(a[STARTS])[span], int_pointer(a[STARTS])[span + 1]
    n_settled, parks = int_pointer(a[SETTLED])[span], int_pointer(a[PARKS])
    if n_settled > 0:
        for t in range(a[N_WINDOW]):
            _copy(_input(a, span, n_settled + t, like), _input(a, span, t, like), channels)
    for row in range(begin, end):
        if parks[row] >= 0:
            target = shifted(pointer_like(a[PARKED], like), parks[row] * a[N_CHANNELS])
            _copy(shifted(pointer_like(a[X], like), row * a[STRIDE]), target, channels)


@inlined
def _copy(source: Any, target: Any, channels: Any) -> None:
    for c in range(channels[0], channels[1], WIDTH):
        store_part(target, c, load_part(source, c, channels[1] - c), channels[1] - c)


@per_dtype
def _task(kind: Any) -> int:
    """Address of the compiled task for rows of that kind."""

    def items(address: int) -> None:
        a = long_pointer(address)
        _take_items(a, pointer(a[X], kind))

    return threads.compile_task(items)
