"""Mixture of experts: a router's logits say which few experts see a row; only those are computed.

A row's result does not depend on how many rows are computed with it, nor on the number of threads, except in
the `reference` implementation.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.dispatch import op
from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.moe.types import ExpertBiases as ExpertBiases
from slipstream.kernels.moe.types import ExpertMatrices as ExpertMatrices
from slipstream.kernels.moe.types import NarrowMatrices as NarrowMatrices
from slipstream.kernels.moe.types import PackedExperts as PackedExperts
from slipstream.kernels.moe.types import Routed as Routed
from slipstream.kernels.moe.types import Routing as Routing


@op("triton", "panels", "cpu", "reference")
def route(logits: Tensor, routing: Routing) -> Routed:
    """The experts of each row and their weights.

    logits: [n_rows, n_experts]. Scores are float32; those chosen are the largest, plus bias, the lowest id among
    equals. (Softmax keeps the order, so there the logits themselves are compared.) A weight is the score of its
    expert without the bias, divided by the sum over the row's experts if `normed`, times `scale`, and rounded
    to the dtype of the logits. A row with a NaN gets valid experts and NaN as weights.
    Sources: Switch Transformers (arXiv 2101.03961) for softmax, DeepSeek-V3 (arXiv 2412.19437, 2.1.2) for
    sigmoid, bias and groups.
    """
    raise NotImplementedError


@op("triton", "panels", "cpu", "reference")
def pack_experts(
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
) -> PackedExperts:
    """Lay the experts of one layer out for `experts`.

    gate_up: [n_experts, 2 * d_inner, d_model], gate first. down: [n_experts, d_model, d_inner]. biases: None for none.
    Of matrices of few bits the values are those of their `dense()`, widened here or while they are multiplied.
    activation: what stands between the two products.
    Keeps no reference to the tensors where the layout is a copy: drop yours, or memory holds both.
    """
    raise NotImplementedError


@op("triton", "panels", "cpu", "reference")
def experts(x: Tensor, routed: Routed, packed: PackedExperts) -> Tensor:
    """Per row the sum of weight * down(activation(gate(x), up(x))) over its experts.

    x: [n_rows, d_model], dtype of the experts. Returns the same. What a row's experts say is added in float32 in
    ascending order of their ids and rounded once. Experts that no row asks for are not read.
    Raises TypeError if `packed` comes from another implementation.
    """
    raise NotImplementedError
