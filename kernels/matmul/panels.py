"""Linear layers on CPUs with AVX2 or AVX-512: one compiled call whatever the shape, the same bits for any rows.

A sum is one chain in ascending order: of fused multiply-adds in float32, or, for bfloat16, of the instruction that
adds two products at a time where there is one. oneDNN (`cpu.py`) does the same work with more time for every call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.compiled import (
    KINDS,
    fetch_add,
    float_pointer,
    inlined,
    long_kernel,
    long_pointer,
    on_line,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.cpu_features import missing
from slipstream.kernels.matmul import narrow
from slipstream.kernels.matmul.formats import PANEL
from slipstream.kernels.matmul.packed import Packed
from slipstream.kernels.matmul.panel_sums import (
    BY_FLOATS,
    inputs_per_step,
    one_panel,
    panels_of,
)
from slipstream.kernels.matmul.quantized import Quantized, widened
from slipstream.kernels.matmul.reference import take_rows as take_rows
from slipstream.kernels.matmul.tile_sums import BY_TWOS
from slipstream.kernels.vector import WIDTH

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)
SERIAL_BELOW = 500_000  # multiply-adds; less is done before a second thread has begun
DTYPES = torch.float32, torch.bfloat16
FEATURE = "fma"  # of the CPU
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
    return f"this CPU has no {FEATURE}" if missing([FEATURE]) else None


def note(device: torch.device, dtype: torch.dtype) -> str | None:
    """What a start should say of this implementation here, or None."""
    reason = narrow.refusal()
    return f"matrices of few bits are widened: {reason}" if reason else None


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    in_blocks = narrow.pack(weight, bias)
    if in_blocks is not None:
        return in_blocks
    weight = widened(weight)
    n_out, n_in = weight.shape
    ends = torch.zeros(n_out) if bias is None else bias.to(torch.float32)
    return PanelWeight(panels_of(weight), F.pad(ends, (0, -n_out % PANEL)).contiguous(), n_in, n_out)


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    if isinstance(packed, narrow.NarrowWeight):
        return narrow.linear(x, packed, out_dtype)
    if not isinstance(packed, PanelWeight):
        raise TypeError(f"panels linear got a {type(packed).__name__}; pack the weight with panels too")
    n_rows, n_steps, n_out = x.shape[0], packed.panels.shape[1], packed.out_features
    at_once = inputs_per_step(x.dtype)
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


@long_kernel
def _run(addresses: Any, shape: Any, task: int, n_threads: int) -> None:
    memory = np.empty(NEXT + 1, np.int64)
    memory[:4], memory[4:7], memory[NEXT] = addresses, shape, 0
    threads.run(task, memory.ctypes.data, n_threads)
    memory[0] = 0  # keeps the memory alive until here


@inlined
def _panels(a: Any, out: Any, way: Any) -> None:
    """Do panels until none is left. a: the arguments. way: how products are added, `BY_…`."""
    x, n_rows, n_steps, n_out = float_pointer(a[X]), a[N_ROWS], a[N_STEPS], a[N_OUT]
    memory = np.empty((n_rows + 3) * PANEL + WIDTH, np.float32)
    totals = float_pointer(on_line(memory.ctypes.data))
    _, begin, add, end = way
    begin(n_rows)
    panel = fetch_add(shifted(a, NEXT), 1)
    while panel * PANEL < n_out:
        weight = shifted(float_pointer(a[WEIGHT]), panel * PANEL * n_steps)
        bias = shifted(float_pointer(a[BIAS]), panel * PANEL)
        one_panel((x, n_rows, n_steps), weight, bias, (out, n_out, panel), (totals, add))
        panel = fetch_add(shifted(a, NEXT), 1)
    end()
    memory[:0] = 0  # keeps the memory alive until here


@per_dtype
def _task(x_kind: Any, kind: Any) -> int:
    """Address of the compiled task for inputs and results of these kinds."""
    by_twos = x_kind is KINDS[torch.bfloat16]

    def items(address: int) -> None:
        a = long_pointer(address)
        if by_twos:
            _panels(a, pointer(a[OUT], kind), BY_TWOS)
        else:
            _panels(a, pointer(a[OUT], kind), BY_FLOATS)

    return threads.compile_task(items)
