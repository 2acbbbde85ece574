"""A dense feed-forward layer and a mixture of experts on one stream, each between norms of its own (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.mlp import GatedMLP, MLPSpec
from slipstream.engine.layers.moe import MoESpec
from slipstream.engine.layers.norm import Norm, NormSpec, load_norm
from slipstream.engine.ranks import Ranks
from slipstream.kernels.matmul.op import Packed, linear, pack
from slipstream.kernels.moe.op import PackedExperts, Routed, Routing, experts, route


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelExperts:
    """One layer. It reads the stream itself, not its norm."""

    dense_norms: tuple[Norm, Norm]  # before and after
    dense: GatedMLP
    expert_norms: tuple[Norm, Norm]
    experts: PackedExperts
    router_norm: Norm  # without a scale
    router_scale: Tensor  # [d_model]
    router: Packed  # [n_experts, d_model]
    routing: Routing
    expert_scale: Tensor  # [n_experts] float32: of each expert's weight
    ranks: Ranks  # it adds what they compute itself, before its norms

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_rows, d_model]. Returns the same shape."""
        (before, after), (before_experts, after_experts) = self.dense_norms, self.expert_norms
        dense = after(self.ranks.add(self.dense(before(x))))  # [n_rows, d_model]
        rows = self.router_norm(x) * self.router_scale * x.shape[1] ** -0.5  # [n_rows, d_model]
        routed = route(linear(rows, self.router).float(), self.routing)
        weights = routed.weights * self.expert_scale[routed.expert_ids.long()]  # [n_rows, top_k]
        said = experts(before_experts(x), Routed(routed.expert_ids, weights), self.experts)
        return dense + after_experts(self.ranks.add(said))


@dataclass(frozen=True, slots=True)
class ParallelExpertsSpec:
    """Its shape. Tensors are `mlp.*`, `experts.*`, `router.*` and four norms of a block."""

    ops: ClassVar[tuple[str, ...]] = ("moe", "gated")
    adds_itself: ClassVar[bool] = True

    dense: MLPSpec
    moe: MoESpec
    norm: NormSpec

    def split(self, n: int) -> ParallelExpertsSpec:
        """What each of n ranks computes. Raises `SettingError`."""
        return replace(self, dense=self.dense.split(n), moe=self.moe.split(n))

    def load(self, weights: TensorSource, name: str) -> ParallelExperts:
        """The layer whose dense part's tensors start with `name`, the block's name and `mlp`."""
        block, d_model = name.removesuffix(".mlp"), self.moe.d_model

        def norms(before: str, after: str) -> tuple[Norm, Norm]:
            first, second = (
                load_norm(weights, f"{block}.{one}_feedforward_layernorm{part}", d_model, self.norm)
                for one, part in (("pre", before), ("post", after))
            )
            return first, second

        scale = weights.take(f"{block}.router.scale", [d_model])
        n_experts = self.moe.n_experts
        return ParallelExperts(
            dense_norms=norms("", "_1"),
            dense=self.dense.load(weights, name),
            expert_norms=norms("_2", "_2"),
            experts=self.moe.load_experts(weights, f"{block}.experts", self.moe),
            router_norm=Norm(torch.ones_like(scale), self.norm.eps),
            router_scale=scale,
            router=pack(weights.take(f"{block}.router.proj.weight", [n_experts, d_model])),
            routing=self.moe.routing,
            expert_scale=weights.take(f"{block}.router.per_expert_scale", [n_experts], torch.float32),
            ranks=weights.ranks,
        )
