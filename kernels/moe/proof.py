"""Proof of routing and experts, plain and as in gpt-oss and Step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.moe.op import (
    ExpertBiases,
    Routed,
    Routing,
    experts,
    pack_experts,
    route,
)
from slipstream.kernels.proof.case import N_ROWS, Make, Rows
from slipstream.kernels.proof.inputs import Inputs

CLAMPED, LIMITED = Activation("clamped", 1.0, 1.702), Activation("limited", 0.5)


def of_moe(
    inputs: Inputs,
    *,
    activation: Activation = SILU,
    d_model: int = 256,
    d_inner: int = 96,
    n_experts: int = 16,
    top_k: int = 4,
) -> Rows:
    """Scattered rows, then many rows of the same experts.

    What the experts are asked for is drawn, so that rounding in the router sends no row elsewhere. With the clamped
    activation come biases, as in gpt-oss.
    """
    g = inputs.g
    gate_up = inputs.put(torch.randn(n_experts, 2 * d_inner, d_model, generator=g) / d_model**0.5)
    down = inputs.put(torch.randn(n_experts, d_model, d_inner, generator=g) / d_inner**0.5)
    biases = None
    if activation.form == "clamped":
        biases = ExpertBiases(inputs.normal(n_experts, 2 * d_inner), inputs.normal(n_experts, d_model))
    packed = pack_experts(gate_up, down, biases, activation)
    logits, x = inputs.normal(N_ROWS, n_experts), inputs.normal(N_ROWS, d_model)
    order = torch.rand(N_ROWS, n_experts, generator=g).argsort(-1)[:, :top_k].sort(-1).values.int()
    order[40:] = order[40]
    ids = order.to(inputs.device)
    weights = inputs.put(torch.rand(N_ROWS, top_k, generator=g), torch.float32)
    routing = Routing(top_k=top_k, scores="softmax", normed=True)

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows = slice(first, first + n)
        found = route(logits[rows], routing)
        return found.expert_ids, found.weights, experts(x[rows], Routed(ids[rows], weights[rows]), packed)

    return Rows(compute)


CASES: Mapping[str, Make] = {
    "plain": of_moe,
    "with biases": partial(of_moe, activation=CLAMPED),
    "limited": partial(of_moe, activation=LIMITED),
}
