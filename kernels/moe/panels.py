"""Experts on CPUs with AVX2 or AVX-512: all of a layer in two compiled calls, with the panels of `kernels/matmul`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.gated.activation import activated
from slipstream.kernels.matmul import panels
from slipstream.kernels.matmul.panel_stack import PanelStack, multiply_groups, stack_panels
from slipstream.kernels.moe import cpu
from slipstream.kernels.moe.choice import route as route
from slipstream.kernels.moe.group import add_up, group
from slipstream.kernels.moe.types import Activation, ExpertBiases, ExpertMatrices, PackedExperts, Routed

refuses = panels.refuses


@dataclass(frozen=True, slots=True)
class PanelExperts:
    """The experts of a layer."""

    gate_up: PanelStack
    down: PanelStack
    activation: Activation | None

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
    activation: Activation | None = None,
) -> PackedExperts:
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        return NarrowExperts(cpu.pack_experts(gate_up, down, biases, activation))
    of_gate_up, of_down = (None, None) if biases is None else biases
    return PanelExperts(stack_panels(gate_up, of_gate_up), stack_panels(down, of_down), activation)


def experts(x: Tensor, routed: Routed, packed: PackedExperts) -> Tensor:
    if isinstance(packed, NarrowExperts):
        return cpu.experts(x, routed, packed.each)
    if not isinstance(packed, PanelExperts):
        raise TypeError(f"panels experts got {type(packed).__name__}; pack them with panels too")
    groups = group(routed.expert_ids, packed.n_experts)
    by_expert = groups.expert_ids, groups.starts
    gathered = x.index_select(0, groups.rows)  # [n_pairs, d_model]
    gate_up = multiply_groups(gathered, *by_expert, packed.gate_up, x.dtype)  # [n_pairs, 2 * d_inner]
    inner = activated(gate_up, packed.activation)  # [n_pairs, d_inner]
    said = multiply_groups(inner, *by_expert, packed.down, torch.float32)  # [n_pairs, d_model]
    return add_up(said, groups, routed.weights, x.dtype)
