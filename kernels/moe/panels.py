"""Experts on CPUs with AVX2 or AVX-512: all of a layer in two compiled calls, with the panels of `kernels/matmul`.

A piece of work is one panel of one expert, for all rows that ask for it. A product has the bits that
`matmul/panels.py` would give it.
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
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.matmul import panels
from slipstream.kernels.matmul.formats import PANEL
from slipstream.kernels.matmul.panel_sums import multiply_floats, multiply_pairs, one_panel
from slipstream.kernels.matmul.panels import SERIAL_BELOW
from slipstream.kernels.moe import cpu
from slipstream.kernels.moe.activation import activated
from slipstream.kernels.moe.choice import route as route
from slipstream.kernels.moe.group import Groups, add_up, group
from slipstream.kernels.moe.types import Clamped, ExpertBiases, ExpertMatrices, PackedExperts, Routed
from slipstream.kernels.vector import WIDTH

refuses = panels.refuses
X, PANELS, BIAS, OUT, EXPERTS, STARTS, N_TOUCHED, N_STEPS, N_OUT, NEXT = range(10)


@dataclass(frozen=True, slots=True)
class PanelStack:
    """One matrix an expert, each laid out as in `matmul/panels.py`."""

    panels: Tensor  # [n_experts, n_panels, n_steps, 64] float32 or [..., 64, 2] bfloat16, zero-filled
    bias: Tensor  # [n_experts, n_panels, 64] float32: what each panel's sums begin with
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class PanelExperts:
    """The experts of a layer."""

    gate_up: PanelStack
    down: PanelStack
    clamped: Clamped | None

    @property
    def n_experts(self) -> int:
        return self.down.panels.shape[0]


@dataclass(frozen=True, slots=True)
class NarrowExperts:
    """Experts of few bits, one product after the other: weights of many times the size are what is saved."""

    each: PackedExperts

    @property
    def n_experts(self) -> int:
        return self.each.n_experts


def pack_experts(
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    biases: ExpertBiases | None = None,
    clamped: Clamped | None = None,
) -> PackedExperts:
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        return NarrowExperts(cpu.pack_experts(gate_up, down, biases, clamped))
    of_gate_up, of_down = (None, None) if biases is None else biases
    return PanelExperts(_stack(gate_up, of_gate_up), _stack(down, of_down), clamped)


def experts(x: Tensor, routed: Routed, packed: PackedExperts) -> Tensor:
    if isinstance(packed, NarrowExperts):
        return cpu.experts(x, routed, packed.each)
    if not isinstance(packed, PanelExperts):
        raise TypeError(f"panels experts got {type(packed).__name__}; pack them with panels too")
    groups = group(routed.expert_ids, packed.n_experts)
    gathered = x.index_select(0, groups.rows)  # [n_pairs, d_model]
    gate_up = _linears(gathered, groups, packed.gate_up, x.dtype)  # [n_pairs, 2 * d_inner]
    inner = activated(gate_up, packed.clamped)  # [n_pairs, d_inner]
    said = _linears(inner, groups, packed.down, torch.float32)  # [n_pairs, d_model]
    return add_up(said, groups, routed.weights, x.dtype)


def _stack(weights: Tensor, biases: Tensor | None) -> PanelStack:
    """weights: [n_experts, out_features, in_features]. biases: [n_experts, out_features]."""
    n_experts, n_out, n_in = weights.shape
    stack, ends = torch.empty(0), torch.empty(n_experts, -(-n_out // PANEL), PANEL)
    for i, weight in enumerate(weights):  # one at a time: a layer's experts are too large for many copies
        one = panels.pack(weight, None if biases is None else biases[i])
        assert isinstance(one, panels.PanelWeight)
        if i == 0:
            stack = one.panels.new_empty((n_experts, *one.panels.shape))
        stack[i], ends[i] = one.panels, one.bias.view(-1, PANEL)
    return PanelStack(stack, ends, n_in, n_out)


def _linears(x: Tensor, groups: Groups, stack: PanelStack, out_dtype: torch.dtype) -> Tensor:
    """Each group's rows times its expert's matrix. x: [n_pairs, in_features]. Returns [n_pairs, out_features]."""
    n_pairs, n_steps, n_out = x.shape[0], stack.panels.shape[2], stack.out_features
    at_once = 2 if x.dtype is torch.bfloat16 else 1
    x = x if stack.in_features % at_once == 0 else F.pad(x, (0, 1))
    out = torch.empty((n_pairs, n_out), dtype=out_dtype)
    tensors = x, stack.panels, stack.bias, out, groups.expert_ids, groups.starts
    _run(
        tuple(one.data_ptr() for one in tensors),
        (groups.expert_ids.shape[0], n_steps, n_out),
        _task[x.dtype, out_dtype],
        threads.available() if n_pairs * n_steps * n_out * at_once >= SERIAL_BELOW else 1,
    )
    return out


@long_kernel
def _run(addresses: Any, shape: Any, task: int, n_threads: int) -> None:
    memory = np.empty(NEXT + 1, np.int64)
    memory[:6], memory[6:9], memory[NEXT] = addresses, shape, 0
    threads.run(task, memory.ctypes.data, n_threads)
    memory[0] = 0  # keeps the memory alive until here


@inlined
def _all_groups(a: Any, out: Any, multiply: Any) -> None:
    """Do panels of experts until none is left. a: the arguments. multiply: (total, inputs, weights) -> total."""
    n_steps, n_out, n_touched = a[N_STEPS], a[N_OUT], a[N_TOUCHED]
    expert_ids, starts = int_pointer(a[EXPERTS]), int_pointer(a[STARTS])
    n_panels, most = (n_out + PANEL - 1) // PANEL, 0
    for i in range(n_touched):
        most = max(most, starts[i + 1] - starts[i])
    memory = np.empty((most + 3) * PANEL + WIDTH, np.float32)
    totals = float_pointer((memory.ctypes.data + 63) // 64 * 64)
    item = fetch_add(shifted(a, NEXT), 1)
    while item < n_touched * n_panels:
        i, panel = item // n_panels, item % n_panels
        first = np.int64(starts[i])
        rows = shifted(float_pointer(a[X]), first * n_steps), starts[i + 1] - first, n_steps
        place = np.int64(expert_ids[i]) * n_panels + panel
        weight = shifted(float_pointer(a[PANELS]), place * n_steps * PANEL)
        target = shifted(out, first * n_out), n_out, panel
        one_panel(rows, weight, shifted(float_pointer(a[BIAS]), place * PANEL), target, (totals, multiply))
        item = fetch_add(shifted(a, NEXT), 1)
    memory[:0] = 0  # keeps the memory alive until here


@per_dtype
def _task(x_kind: Any, kind: Any) -> int:
    """Address of the compiled task for inputs and results of these kinds."""
    by_pairs = x_kind is KINDS[torch.bfloat16]

    def items(address: int) -> None:
        a = long_pointer(address)
        if by_pairs:
            _all_groups(a, pointer(a[OUT], kind), multiply_pairs)
        else:
            _all_groups(a, pointer(a[OUT], kind), multiply_floats)

    return threads.compile_task(items)
