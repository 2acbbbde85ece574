"""Linear layers on CPUs with AVX2 or AVX-512: one compiled call whatever the shape, the same bits for any rows.

A sum is one chain in ascending order: of fused multiply-adds in float32, or, for bfloat16, of the instruction that
adds two products at a time where there is one. oneDNN (`cpu.py`) does the same work with more time for every call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.compiled import (
    KINDS,
    address_of,
    fetch_add,
    float_pointer,
    inlined,
    long_kernel,
    long_pointer,
    per_dtype,
    pointer,
    prefetch,
    shifted,
)
from slipstream.kernels.matmul.packed import Packed
from slipstream.kernels.matmul.quantized import Quantized, widened
from slipstream.kernels.vector import (
    WIDTH,
    add_pairs,
    fma,
    load,
    load_four,
    splat,
    store,
    store_four,
    store_part,
)

PANEL = 64  # outputs computed at a time: four vectors
STEPS = 32  # steps of the sums taken with all rows before the next: 8 KiB of weights, so that memory is asked steadily
AHEAD = 64  # steps between the weights in use and those that are being fetched
SERIAL_BELOW = 2_000_000  # multiply-adds; less is done before a second thread has woken
DTYPES = torch.float32, torch.bfloat16
FEATURE = "fma"  # of the CPU
# 32 registers of 16 floats, not 16 of 8
IS_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
X, WEIGHT, BIAS, OUT, N_ROWS, N_STEPS, N_OUT, NEXT = range(8)


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """The weight transposed in panels of 64 outputs. A step is one input, or two neighbours of bfloat16."""

    panels: Tensor  # [n_panels, n_steps, 64] float32 or [n_panels, n_steps, 64, 2] bfloat16, zero-filled
    bias: Tensor  # [n_panels * 64] float32, zero without one
    in_features: int
    out_features: int


@functools.cache
def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return "float32 and bfloat16 only"
    return None if llvmlite.binding.get_host_cpu_features().get(FEATURE) else f"this CPU has no {FEATURE}"


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    weight = widened(weight)
    n_out, n_in = weight.shape
    at_once = _inputs_per_step(weight.dtype)
    padded = F.pad(weight, (0, -n_in % at_once, 0, -n_out % PANEL))
    panels = padded.view(-1, PANEL, padded.shape[1] // at_once, at_once).transpose(1, 2).contiguous()
    ends = torch.zeros(n_out) if bias is None else bias.to(torch.float32)
    return PanelWeight(panels, F.pad(ends, (0, -n_out % PANEL)).contiguous(), n_in, n_out)


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    if not isinstance(packed, PanelWeight):
        raise TypeError(f"panels linear got a {type(packed).__name__}; pack the weight with panels too")
    n_rows, n_steps, n_out = x.shape[0], packed.panels.shape[1], packed.out_features
    at_once = _inputs_per_step(x.dtype)
    x = x.contiguous() if packed.in_features % at_once == 0 else F.pad(x, (0, 1))
    wide = out_dtype is torch.float32 or x.dtype is torch.float32
    out = torch.empty((n_rows, n_out), dtype=torch.float32 if wide else x.dtype)
    _run(
        (x.data_ptr(), packed.panels.data_ptr(), packed.bias.data_ptr(), out.data_ptr()),
        (n_rows, n_steps, n_out),
        _task[x.dtype, out.dtype],
        threads.available() if n_rows * n_steps * n_out * at_once >= SERIAL_BELOW else 1,
    )
    return out if out_dtype is None else out.to(out_dtype)


def _inputs_per_step(dtype: torch.dtype) -> int:
    return 2 if dtype is torch.bfloat16 else 1


@long_kernel
def _run(addresses: Any, shape: Any, task: int, n_threads: int) -> None:
    memory = np.empty(NEXT + 1, np.int64)
    memory[:4], memory[4:7], memory[NEXT] = addresses, shape, 0
    threads.run(task, memory.ctypes.data, n_threads)
    memory[0] = 0  # keeps the memory alive until here


@inlined
def _panels(a: Any, out: Any, multiply: Any) -> None:
    """Do panels until none is left. a: the arguments. multiply: (total, inputs, weights) -> total."""
    x, n_rows, n_steps, n_out = float_pointer(a[X]), a[N_ROWS], a[N_STEPS], a[N_OUT]
    memory = np.empty((n_rows + 3) * PANEL + WIDTH, np.float32)
    totals = float_pointer((memory.ctypes.data + 63) // 64 * 64)
    panel = fetch_add(shifted(a, NEXT), 1)
    while panel * PANEL < n_out:
        weight = shifted(float_pointer(a[WEIGHT]), panel * PANEL * n_steps)
        bias = shifted(float_pointer(a[BIAS]), panel * PANEL)
        one_panel((x, n_rows, n_steps), weight, bias, (out, n_out, panel), (totals, multiply))
        panel = fetch_add(shifted(a, NEXT), 1)
    memory[:0] = 0  # keeps the memory alive until here


@inlined
def one_panel(rows: Any, weight: Any, bias: Any, target: Any, work: Any) -> None:
    """64 outputs of all rows. rows: (pointer, how many, steps of each); target: (pointer, n_out, panel).

    work: (scratch of (n_rows + 3) * 64 floats, multiply). What `kernels/moe` runs for each expert.
    """
    x, n_rows, n_steps = rows
    out, n_out, panel = target
    totals, multiply = work
    steps = n_steps if n_rows <= 4 else STEPS
    for row in range(n_rows):
        for i in range(0, PANEL, WIDTH):
            store(totals, row * PANEL + i, load(bias, i))
    for begin in range(0, n_steps, steps):
        _all_rows(x, (n_rows, n_steps), weight, (begin, min(begin + steps, n_steps)), (totals, multiply))
    for row in range(n_rows):
        place = shifted(out, row * n_out + panel * PANEL)
        for i in range(0, min(PANEL, n_out - panel * PANEL), WIDTH):
            store_part(place, i, load(totals, row * PANEL + i), n_out - panel * PANEL - i)


@inlined
def _all_rows(x: Any, shape: Any, weight: Any, span: Any, work: Any) -> None:
    """64 outputs of all rows, steps begin … end - 1. work: (totals, multiply)."""
    n_rows, n_steps = shape
    totals, multiply = work
    n_fours = (n_rows + 2) // 4
    for row in range(0, n_rows, 4):
        left, start, sums = n_rows - row, shifted(x, row * n_steps), shifted(totals, row * PANEL)
        if left > 1:
            # of two or three rows the last is done twice: cheaper than reading the weights twice
            rows = n_steps, min(2, left - 1) * n_steps, min(3, left - 1) * n_steps
            # Every four rows fetch a share of the next weights, so that memory is neither idle nor in a rush.
            ahead = shifted(weight, AHEAD * PANEL)
            lines = (
                shifted(ahead, row // n_fours * WIDTH),
                shifted(ahead, (row + 1) // n_fours * WIDTH),
                shifted(ahead, (row + 2) // n_fours * WIDTH),
                shifted(ahead, (row + 3) // n_fours * WIDTH),
            )
            if IS_WIDE:
                _four(start, rows, weight, span, (sums, lines, multiply))
            else:
                for i in range(4):
                    part = shifted(weight, i * WIDTH)
                    _quarter(start, rows, part, span, (shifted(sums, i * WIDTH), lines[i], multiply))
        else:
            _one(start, weight, span, sums, multiply)


@inlined
def _four(x: Any, rows: Any, weight: Any, span: Any, work: Any) -> None:
    """The same for four rows; rows: where the last three start; work: (totals, what to fetch meanwhile, multiply)."""
    totals, lines, multiply = work
    next0, next1, next2, next3 = lines
    second, third, fourth = rows
    a0, a1, a2, a3 = load_four(totals, 0)
    b0, b1, b2, b3 = load_four(totals, PANEL)
    c0, c1, c2, c3 = load_four(totals, 2 * PANEL)
    d0, d1, d2, d3 = load_four(totals, 3 * PANEL)
    for k in range(span[0], span[1]):
        at = k * PANEL
        prefetch(address_of(shifted(next0, at)))
        prefetch(address_of(shifted(next1, at)))
        prefetch(address_of(shifted(next2, at)))
        prefetch(address_of(shifted(next3, at)))
        w0, w1, w2, w3 = load_four(weight, at)
        a, b, c, d = splat(x[k]), splat(x[second + k]), splat(x[third + k]), splat(x[fourth + k])
        a0, a1, a2, a3 = multiply(a0, a, w0), multiply(a1, a, w1), multiply(a2, a, w2), multiply(a3, a, w3)
        b0, b1, b2, b3 = multiply(b0, b, w0), multiply(b1, b, w1), multiply(b2, b, w2), multiply(b3, b, w3)
        c0, c1, c2, c3 = multiply(c0, c, w0), multiply(c1, c, w1), multiply(c2, c, w2), multiply(c3, c, w3)
        d0, d1, d2, d3 = multiply(d0, d, w0), multiply(d1, d, w1), multiply(d2, d, w2), multiply(d3, d, w3)
    store_four(totals, 0, (a0, a1, a2, a3))
    store_four(totals, PANEL, (b0, b1, b2, b3))
    store_four(totals, 2 * PANEL, (c0, c1, c2, c3))
    store_four(totals, 3 * PANEL, (d0, d1, d2, d3))


@inlined
def _quarter(x: Any, rows: Any, weight: Any, span: Any, work: Any) -> None:
    """The same for 16 of the outputs, whose sums a narrow machine can keep in registers; weights are in its cache."""
    totals, line, multiply = work
    second, third, fourth = rows
    a, b = load(totals, 0), load(totals, PANEL)
    c, d = load(totals, 2 * PANEL), load(totals, 3 * PANEL)
    for k in range(span[0], span[1]):
        prefetch(address_of(shifted(line, k * PANEL)))
        w = load(weight, k * PANEL)
        a, b = multiply(a, splat(x[k]), w), multiply(b, splat(x[second + k]), w)
        c, d = multiply(c, splat(x[third + k]), w), multiply(d, splat(x[fourth + k]), w)
    store(totals, 0, a)
    store(totals, PANEL, b)
    store(totals, 2 * PANEL, c)
    store(totals, 3 * PANEL, d)


@inlined
def _one(x: Any, weight: Any, span: Any, totals: Any, multiply: Any) -> None:
    """The same for one row."""
    a0, a1, a2, a3 = load_four(totals, 0)
    for k in range(span[0], span[1]):
        at, a = k * PANEL, splat(x[k])
        a0, a1 = multiply(a0, a, load(weight, at)), multiply(a1, a, load(weight, at + 16))
        a2, a3 = multiply(a2, a, load(weight, at + 32)), multiply(a3, a, load(weight, at + 48))
    store_four(totals, 0, (a0, a1, a2, a3))


@inlined
def multiply_floats(total: Any, x: Any, weight: Any) -> Any:
    return fma(x, weight, total)


@inlined
def multiply_pairs(total: Any, x: Any, weight: Any) -> Any:
    return add_pairs(total, x, weight)


@per_dtype
def _task(x_kind: Any, kind: Any) -> int:
    """Address of the compiled task for inputs and results of these kinds."""
    by_pairs = x_kind is KINDS[torch.bfloat16]

    def items(address: int) -> None:
        a = long_pointer(address)
        if by_pairs:
            _panels(a, pointer(a[OUT], kind), multiply_pairs)
        else:
            _panels(a, pointer(a[OUT], kind), multiply_floats)

    return threads.compile_task(items)
