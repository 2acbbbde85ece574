"""Experts on CPUs without AVX-512: one product after the other, each of the rows that ask for its expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.compiled import refuses as refuses
from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.gated.op import gated_mul
from slipstream.kernels.matmul.op import Packed, linear, pack
from slipstream.kernels.moe.choice import route as route
from slipstream.kernels.moe.group import add_up, group
from slipstream.kernels.moe.types import ExpertBiases, ExpertMatrices, PackedExperts, Routed


@dataclass(frozen=True, slots=True)
class ExpertList:
    """Two packed matrices an expert."""

    gate_up: Sequence[Packed]
    down: Sequence[Packed]
    activation: Activation

    @property
    def n_experts(self) -> int:
        return len(self.down)


def pack_experts(
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
) -> PackedExperts:
    gate_ups, downs = (one if isinstance(one, Tensor) else one.each for one in (gate_up, down))
    gate_up_biases, down_biases = ([None] * len(downs),) * 2 if biases is None else biases
    return ExpertList(
        [pack(one, bias) for one, bias in zip(gate_ups, gate_up_biases, strict=True)],
        [pack(one, bias) for one, bias in zip(downs, down_biases, strict=True)],
        activation,
    )


def experts(x: Tensor, routed: Routed, packed: PackedExperts) -> Tensor:
    if not isinstance(packed, ExpertList):
        raise TypeError(f"cpu experts got {type(packed).__name__}; pack them with cpu too")
    groups = group(routed.expert_ids, packed.n_experts)
    gathered = x.index_select(0, groups.rows)  # [n_pairs, d_model]
    said = torch.empty(gathered.shape)  # [n_pairs, d_model] float32
    starts = groups.starts.tolist()
    for i, expert in enumerate(groups.expert_ids.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            break
        inner = gated_mul(linear(gathered[rows], packed.gate_up[expert]), packed.activation)  # [n, d_inner]
        said[rows] = linear(inner, packed.down[expert], torch.float32)  # [n, d_model]
    return add_up(said, groups, routed.weights, x.dtype)
