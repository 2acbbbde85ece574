"""A matrix for each of several groups of rows, in panels: experts, heads. One compiled call multiplies all groups.

A piece of work is one panel of one matrix, for all rows of a group. A product has the bits that `panels.py` would
give it.
"""

from __future__ import annotations

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
    int_pointer,
    long_kernel,
    long_pointer,
    on_line,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.matmul import panels
from slipstream.kernels.matmul.formats import PANEL
from slipstream.kernels.matmul.narrow_sums import with_rows
from slipstream.kernels.matmul.panel_sums import BY_FLOATS, inputs_per_step, one_panel
from slipstream.kernels.matmul.panels import SERIAL_BELOW
from slipstream.kernels.matmul.tile_sums import BY_TWOS
from slipstream.kernels.vector import WIDTH

X, PANELS, BIAS, OUT, MATRICES, STARTS, N_GROUPS, N_STEPS, N_OUT, NEXT = range(10)


@dataclass(frozen=True, slots=True)
class PanelStack:
    """Matrices of one shape, each laid out as in `panels.py`."""

    panels: Tensor  # [n_matrices, n_panels, n_steps, 64] float32 or [..., 64, 2] bfloat16, zero-filled
    bias: Tensor  # [n_matrices, n_panels, 64] float32: what each panel's sums begin with
    in_features: int
    out_features: int

    def __len__(self) -> int:
        return self.panels.shape[0]


def stack_panels(weights: Tensor, biases: Tensor | None = None) -> PanelStack:
    """weights: [n_matrices, out_features, in_features]. biases: [n_matrices, out_features]."""
    n_matrices, n_out, n_in = weights.shape
    stack, ends = torch.empty(0), torch.empty(n_matrices, -(-n_out // PANEL), PANEL)
    for i, weight in enumerate(weights):  # one at a time: a layer's experts are too large for many copies
        one = panels.pack(weight, None if biases is None else biases[i])
        assert isinstance(one, panels.PanelWeight)
        if i == 0:
            stack = one.panels.new_empty((n_matrices, *one.panels.shape))
        stack[i], ends[i] = one.panels, one.bias.view(-1, PANEL)
    return PanelStack(stack, ends, n_in, n_out)


def multiply_groups(
    x: Tensor, matrix_ids: Tensor, starts: Tensor, stack: PanelStack, out_dtype: torch.dtype
) -> Tensor:
    """Rows starts[i] … starts[i + 1] - 1 times the matrix matrix_ids[i], for each group i; the last may have no rows.

    x: [n_rows, in_features], contiguous. matrix_ids: [n_groups] int32; starts: [n_groups + 1] int32.
    Returns [n_rows, out_features].
    """
    n_rows, n_steps, n_out = x.shape[0], stack.panels.shape[2], stack.out_features
    at_once = inputs_per_step(x.dtype)
    x = x if stack.in_features % at_once == 0 else F.pad(x, (0, 1))
    out = torch.empty((n_rows, n_out), dtype=out_dtype)
    tensors = x, stack.panels, stack.bias, out, matrix_ids, starts
    _run(
        tuple(one.data_ptr() for one in tensors),
        (matrix_ids.shape[0], n_steps, n_out),
        _task[x.dtype, out_dtype],
        threads.available() if n_rows * n_steps * n_out * at_once >= SERIAL_BELOW else 1,
    )
    return out


@long_kernel
def _run(addresses: Any, shape: Any, task: int, n_threads: int) -> None:
    memory = np.empty(NEXT + 1, np.int64)
    memory[:6], memory[6:9], memory[NEXT] = addresses, shape, 0
    memory[N_GROUPS] = with_rows(int_pointer(addresses[STARTS]), shape[0])
    threads.run(task, memory.ctypes.data, n_threads)
    memory[0] = 0  # keeps the memory alive until here


@inlined
def _all_groups(a: Any, out: Any, way: Any) -> None:
    """Do panels of matrices until none is left. a: the arguments. way: how products are added, `BY_…`."""
    n_steps, n_out, n_groups = a[N_STEPS], a[N_OUT], a[N_GROUPS]
    matrix_ids, starts = int_pointer(a[MATRICES]), int_pointer(a[STARTS])
    n_panels, most = (n_out + PANEL - 1) // PANEL, 0
    for i in range(n_groups):
        most = max(most, starts[i + 1] - starts[i])
    memory = np.empty((most + 3) * PANEL + WIDTH, np.float32)
    totals = float_pointer(on_line(memory.ctypes.data))
    _, begin, add, end = way
    begun = np.int64(0)
    item = fetch_add(shifted(a, NEXT), 1)
    while item < n_groups * n_panels:
        i, panel = item // n_panels, item % n_panels
        first = np.int64(starts[i])
        rows = shifted(float_pointer(a[X]), first * n_steps), starts[i + 1] - first, n_steps
        if rows[1] != begun:
            begun = rows[1]
            begin(begun)
        place = np.int64(matrix_ids[i]) * n_panels + panel
        weight = shifted(float_pointer(a[PANELS]), place * n_steps * PANEL)
        target = shifted(out, first * n_out), n_out, panel
        one_panel(rows, weight, shifted(float_pointer(a[BIAS]), place * PANEL), target, (totals, add))
        item = fetch_add(shifted(a, NEXT), 1)
    end()
    memory[:0] = 0  # keeps the memory alive until here


@per_dtype
def _task(x_kind: Any, kind: Any) -> int:
    """Address of the compiled task for inputs and results of these kinds."""
    by_twos = x_kind is KINDS[torch.bfloat16]

    def items(address: int) -> None:
        a = long_pointer(address)
        if by_twos:
            _all_groups(a, pointer(a[OUT], kind), BY_TWOS)
        else:
            _all_groups(a, pointer(a[OUT], kind), BY_FLOATS)

    return threads.compile_task(items)
