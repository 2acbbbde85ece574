"""Experts on CPUs with AVX2 or AVX-512: all of a layer in two compiled calls, with the sums of `kernels/matmul`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.gated.op import gated_mul
from slipstream.kernels.kernel import run
from slipstream.kernels.matmul import narrow, panels
from slipstream.kernels.matmul.narrow import NarrowStack
from slipstream.kernels.matmul.panel_stack import PanelStack, multiply_panels, stack_panels
from slipstream.kernels.moe import cpu
from slipstream.kernels.moe.choice import route as route
from slipstream.kernels.moe.group import add_up, group
from slipstream.kernels.moe.types import ExpertBiases, ExpertMatrices, PackedExperts, Routed

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)
refuses = panels.refuses


@dataclass(frozen=True, slots=True)
class PanelExperts:
    """The experts of a layer."""

    gate_up: PanelStack | NarrowStack
    down: PanelStack | NarrowStack
    activation: Activation

    @property
    def n_experts(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class GatheringExperts:
    """Experts that want inputs in orders of their own (act-order), or products of two kinds: one after the other."""

    each: PackedExperts

    @property
    def n_experts(self) -> int:
        return self.each.n_experts


def pack_experts(
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
) -> PackedExperts:
    of_gate_up, of_down = (None, None) if biases is None else biases
    stacks = _stack(gate_up, of_gate_up), _stack(down, of_down)
    if stacks[0] is None or stacks[1] is None:
        return GatheringExperts(cpu.pack_experts(gate_up, down, biases, activation))
    return PanelExperts(stacks[0], stacks[1], activation)


def _stack(matrices: ExpertMatrices, biases: Tensor | None) -> PanelStack | NarrowStack | None:
    if isinstance(matrices, Tensor):
        return stack_panels(matrices, biases)
    ends = [None] * len(matrices.each) if biases is None else biases
    return narrow.stack([narrow.pack_parts(one, end) for one, end in zip(matrices.each, ends, strict=True)])


def experts(x: Tensor, routed: Routed, packed: PackedExperts) -> Tensor:
    if isinstance(packed, GatheringExperts):
        return run(cpu.experts, x, routed, packed.each)
    if not isinstance(packed, PanelExperts):
        raise TypeError(f"panels experts got {type(packed).__name__}; pack them with panels too")
    groups = group(routed.expert_ids, packed.n_experts)
    by_expert = groups.expert_ids, groups.starts
    gathered = x.index_select(0, groups.rows)  # [n_pairs, d_model]
    gate_up = _multiply(gathered, packed.gate_up, x.dtype, by_expert)  # [n_pairs, 2 * d_inner]
    inner = gated_mul(gate_up, packed.activation)  # [n_pairs, d_inner]
    said = _multiply(inner, packed.down, torch.float32, by_expert)  # [n_pairs, d_model]
    return add_up(said, groups, routed.weights, x.dtype)


def _multiply(
    x: Tensor, matrices: PanelStack | NarrowStack, dtype: torch.dtype, groups: tuple[Tensor, Tensor]
) -> Tensor:
    if isinstance(matrices, NarrowStack):
        return narrow.multiply_groups(x, matrices, dtype, groups)
    return multiply_panels(x, matrices, dtype, groups)
