"""What the ops of a mixture of experts take and give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.kernels.matmul.quantized import Quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a row's experts are chosen and weighed.

    With groups, the experts are cut into n_groups runs of one length, of at least two; the n_groups_kept best
    stay, by the sum of their two best scores. They must hold top_k experts; nothing is checked per call.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"]  # of the logits, over all experts
    normed: bool  # whether the weights of a row are divided by their sum
    scale: float = 1.0  # of all weights, at the end
    bias: Tensor | None = None  # [n_experts] float32, added to the scores for the choice alone
    n_groups: int = 1
    n_groups_kept: int = 1

    @property
    def by_logits(self) -> bool:
        """Whether logits decide: softmax keeps their order but may round two of them to one score."""
        return self.scores == "softmax" and self.bias is None and self.n_groups == 1


class Routed(NamedTuple):
    """The experts of each row."""

    expert_ids: Tensor  # [n_rows, top_k] int32, ascending
    weights: Tensor  # [n_rows, top_k] float32 (float64 for float64 logits), in the same order


class ExpertBiases(NamedTuple):
    """What is added to the products of every expert, in the experts' dtype."""

    gate_up: Tensor  # [n_experts, 2 * d_inner], gate first
    down: Tensor  # [n_experts, d_model]


@dataclass(frozen=True, slots=True)
class NarrowMatrices:
    """A matrix of few bits for each expert."""

    each: Sequence[Quantized]  # [out_features, in_features] of one dtype, at least one

    @property
    def device(self) -> torch.device:
        return self.each[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.each[0].dtype

    def dense(self) -> Tensor:
        """The values, [n_experts, out_features, in_features]."""
        stack = torch.empty((len(self.each), *self.each[0].shape), dtype=self.dtype, device=self.device)
        for i, one in enumerate(self.each):  # one at a time: a layer's experts are too large for many copies
            stack[i] = one.dense()
        return stack


ExpertMatrices = Tensor | NarrowMatrices  # [n_experts, out_features, in_features]


def stacked(matrices: ExpertMatrices) -> Tensor:
    """The values, for implementations that multiply with nothing narrower."""
    return matrices if isinstance(matrices, Tensor) else matrices.dense()


class PackedExperts(Protocol):
    """The experts of a layer in the layout of one implementation; only that one's `experts` takes them."""

    @property
    def n_experts(self) -> int: ...
