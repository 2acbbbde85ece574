"""Definition of `moe` in plain torch: float32 inside, float64 for float64. It waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.gated.reference import gated_mul
from slipstream.kernels.moe.types import (
    ExpertBiases,
    ExpertMatrices,
    PackedExperts,
    Routed,
    Routing,
    stacked,
)


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """The weights as they are."""

    gate_up: Tensor  # [n_experts, 2 * d_inner, d_model]
    down: Tensor  # [n_experts, d_model, d_inner]
    biases: ExpertBiases | None
    activation: Activation

    @property
    def n_experts(self) -> int:
        return self.down.shape[0]


def route(logits: Tensor, routing: Routing) -> Routed:
    wide = _wide(logits)  # [n_rows, n_experts]
    scores = wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()  # [n_rows, n_experts]
    keys = wide if routing.by_logits else scores  # [n_rows, n_experts]
    if routing.bias is not None:
        keys = keys + routing.bias
    if routing.n_groups > 1:
        keys = _without_lesser_groups(keys, routing)
    chosen = _largest(keys, routing.top_k).sort(-1).values  # [n_rows, top_k]
    weights = scores.gather(-1, chosen)  # [n_rows, top_k]
    if routing.normed:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = (weights * routing.scale).to(logits.dtype).to(wide.dtype)
    broken = logits.isnan().any(-1, keepdim=True)  # [n_rows, 1]
    return Routed(chosen.to(torch.int32), weights.masked_fill(broken, float("nan")))


def pack_experts(
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
) -> PackedExperts:
    return PlainExperts(stacked(gate_up), stacked(down), biases, activation)


def experts(x: Tensor, routed: Routed, packed: PackedExperts) -> Tensor:
    if not isinstance(packed, PlainExperts):
        raise TypeError(f"reference experts got {type(packed).__name__}; pack them with reference too")
    total = torch.zeros_like(_wide(x))  # [n_rows, d_model]
    for expert in sorted(set(routed.expert_ids.flatten().tolist())):
        rows, places = (routed.expert_ids == expert).nonzero(as_tuple=True)  # [n] each
        biases = packed.biases
        of_gate_up, of_down = (None, None) if biases is None else (one[expert] for one in biases)
        gate_up = F.linear(x[rows], packed.gate_up[expert], of_gate_up)  # [n, 2 * d_inner]
        inner = gated_mul(gate_up, packed.activation)  # [n, d_inner]
        said = _wide(F.linear(inner, packed.down[expert], of_down))  # [n, d_model]
        total[rows] += said * routed.weights[rows, places, None]
    return total.to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _largest(keys: Tensor, n: int) -> Tensor:
    """Ids of the n largest of each row, [n_rows, n]; the lowest among equals."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[:, :n]


def _without_lesser_groups(keys: Tensor, routing: Routing) -> Tensor:
    """keys [n_rows, n_experts] with -inf in the groups that are not kept."""
    n_rows, n_experts = keys.shape
    grouped = keys.view(n_rows, routing.n_groups, n_experts // routing.n_groups)
    best = grouped.topk(2, -1).values.sum(-1)  # [n_rows, n_groups]
    kept = torch.zeros_like(best, dtype=torch.bool)  # [n_rows, n_groups]
    kept.scatter_(-1, _largest(best, routing.n_groups_kept), value=True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
