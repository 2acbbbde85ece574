"""Weights in panels of 64 outputs: one matrix, or one for each of several groups of rows, as experts and heads have.

One compiled call multiplies all groups. A piece of work is one panel of one matrix, for all rows of a group.
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
from slipstream.kernels.matmul.formats import PANEL
from slipstream.kernels.matmul.narrow_sums import with_rows
from slipstream.kernels.matmul.panel_sums import BY_FLOATS, inputs_per_step, one_panel, panels_of
from slipstream.kernels.matmul.tile_sums import BY_TWOS
from slipstream.kernels.vector import WIDTH

SERIAL_BELOW = 500_000  # multiply-adds; less is done before a second thread has begun
X, PANELS, BIAS, OUT, MATRICES, STARTS, N_ROWS, N_GROUPS, N_STEPS, N_OUT, NEXT = range(11)


@dataclass(frozen=True, slots=True)
class PanelStack:
    """Matrices of one shape, transposed in panels. A step is one input, or two neighbours of bfloat16."""

    panels: Tensor  # [n_matrices, n_panels, n_steps, 64] float32 or [..., 64, 2] bfloat16, zero-filled
    bias: Tensor  # [n_matrices, n_panels, 64] float32: what each panel's sums begin with
    in_features: int
    out_features: int

    def __len__(self) -> int:
        return self.panels.shape[0]


def stack_panels(weights: Tensor, biases: Tensor | None = None) -> PanelStack:
    """weights: [n_matrices, out_features, in_features]. biases: [n_matrices, out_features]."""
    n_matrices, n_out, n_in = weights.shape
    ends = torch.zeros(n_matrices, n_out) if biases is None else biases.to(torch.float32)
    ends = F.pad(ends, (0, -n_out % PANEL)).contiguous().view(n_matrices, -1, PANEL)
    stack = panels_of(weights[0])[None]
    if n_matrices > 1:
        stack = stack.new_empty((n_matrices, *stack.shape[1:]))
        for i, weight in enumerate(weights):  # one at a time: a layer's experts are too large for many copies
            stack[i] = panels_of(weight)
    return PanelStack(stack, ends, n_in, n_out)


def multiply_panels(
    x: Tensor, stack: PanelStack, out_dtype: torch.dtype, groups: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Rows times a matrix: [n_rows, out_features] of `out_dtype`, float32 or x's.

    x: [n_rows, in_features], dtype of the matrices. groups: (matrix_ids [n_groups], starts [n_groups + 1]), int32:
    rows starts[i] … starts[i + 1] - 1 times matrix matrix_ids[i], for each group i; the last may have no rows. None:
    all rows times the only matrix.
    """
    n_rows, n_steps, n_out = x.shape[0], stack.panels.shape[2], stack.out_features
    at_once = inputs_per_step(x.dtype)
    x = x.contiguous() if stack.in_features % at_once == 0 else F.pad(x, (0, 1))
    out = torch.empty((n_rows, n_out), dtype=out_dtype)
    ids, starts, n_groups = 0, 0, 1
    if groups is not None:
        ids, starts, n_groups = groups[0].data_ptr(), groups[1].data_ptr(), len(groups[0])
    _run(
        (x.data_ptr(), stack.panels.data_ptr(), stack.bias.data_ptr(), out.data_ptr(), ids, starts),
        (n_rows, n_groups, n_steps, n_out),
        _task[x.dtype, out_dtype],
        threads.available() if n_rows * n_steps * n_out * at_once >= SERIAL_BELOW else 1,
    )
    return out


@long_kernel
def _run(addresses: Any, shape: Any, task: int, n_threads: int) -> None:
    """addresses, shape: the arguments up to N_OUT, in that order; MATRICES and STARTS are 0 for one group."""
    memory = np.empty(NEXT + 1, np.int64)
    memory[:N_ROWS], memory[N_ROWS:NEXT], memory[NEXT] = addresses, shape, 0
    if addresses[STARTS] != 0:
        memory[N_GROUPS] = with_rows(int_pointer(addresses[STARTS]), shape[1])
    threads.run(task, memory.ctypes.data, n_threads)
    memory[0] = 0  # keeps the memory alive until here


@inlined
def _group(a: Any, i: int) -> Any:
    """The matrix of a group, its first row, and how many it has."""
    if a[STARTS] == 0:
        return np.int64(0), np.int64(0), a[N_ROWS]
    starts = int_pointer(a[STARTS])
    return np.int64(int_pointer(a[MATRICES])[i]), np.int64(starts[i]), np.int64(starts[i + 1] - starts[i])


@inlined
def _all_groups(a: Any, out: Any, way: Any) -> None:
    """Do panels of matrices until none is left. a: the arguments. way: how products are added, `BY_…`."""
    n_steps, n_out, n_groups = a[N_STEPS], a[N_OUT], a[N_GROUPS]
    n_panels, most = (n_out + PANEL - 1) // PANEL, np.int64(0)
    for i in range(n_groups):
        most = max(most, _group(a, i)[2])
    memory = np.empty((most + 3) * PANEL + WIDTH, np.float32)
    totals = float_pointer(on_line(memory.ctypes.data))
    _, begin, add, end = way
    begun = np.int64(0)
    item = fetch_add(shifted(a, NEXT), 1)
    while item < n_groups * n_panels:
        matrix, first, n_rows = _group(a, item // n_panels)
        if n_rows != begun:
            begun = n_rows
            begin(begun)
        panel = item % n_panels
        rows = shifted(float_pointer(a[X]), first * n_steps), n_rows, n_steps
        place = matrix * n_panels + panel
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
