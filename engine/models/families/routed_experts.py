"""What families with experts like DeepSeek's have in common: which layers have them, and how rows are routed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.decoder import FeedForward, FeedForwardSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.moe import CHOICE_BIAS, MoESpec, SharedSpec
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.engine.models.reading.fields import MOST_PARTS
from slipstream.kernels.moe.op import Routing

DENSE, SPARSE = "dense", "sparse"  # of `mlp_layer_types`
Scores = Literal["softmax", "sigmoid"]


def feed_forwards(config: ModelConfig, experts: MoESpec) -> list[FeedForwardSpec]:
    """Each layer's feed-forward part: listed, or dense in the first layers.

    Raises `UnsupportedModel` naming key and value.
    """
    fields, n, dense = config.fields, config.n_layers, MLPSpec(config.d_model, config.d_ffn)
    kinds = fields.names("mlp_layer_types", (DENSE, SPARSE), n)
    if kinds is None:
        n_dense = fields.count("first_k_dense_replace", 1, least=0)
        kinds = [DENSE if i < n_dense else SPARSE for i in range(n)]
    if fields.count("moe_layer_freq", 1) != 1:
        raise fields.refuse("moe_layer_freq", "must be 1")
    return [dense if kind == DENSE else experts for kind in kinds]


def read_experts(config: ModelConfig, scores: Scores = "sigmoid") -> MoESpec:
    """The mixture of experts. scores: of the router; with sigmoid it has a bias for the choice, and groups.

    Raises `UnsupportedModel` naming key and value.
    """
    fields, by_sigmoid = config.fields, scores == "sigmoid"
    n_experts, top_k = fields.count("n_routed_experts", most=MOST_PARTS), fields.count("num_experts_per_tok")
    n_groups, n_kept = fields.count("n_group", 1), fields.count("topk_group", 1)
    if fields.text("scoring_func", scores) != scores:
        raise fields.refuse("scoring_func", f"must be {scores}")
    method = "noaux_tc" if by_sigmoid else "greedy"
    if fields.text("topk_method", method) != method:
        raise fields.refuse("topk_method", f"must be {method}")
    if n_experts % n_groups or (n_groups > 1 and n_experts < 2 * n_groups):
        raise fields.refuse("n_group", f"must divide {n_experts} experts into groups of at least two")
    if n_kept > n_groups:
        raise fields.refuse("topk_group", f"must be at most n_group = {n_groups}")
    if top_k > n_experts // n_groups * n_kept:
        raise fields.refuse("num_experts_per_tok", f"{n_kept} groups of {n_experts // n_groups} hold fewer")
    d_ffn, n_shared = fields.count("moe_intermediate_size"), fields.count("n_shared_experts", 1, least=0)
    normed = fields.flag("norm_topk_prob", default=by_sigmoid)
    if normed and not by_sigmoid:
        raise fields.refuse("norm_topk_prob", "implementations disagree about it beside softmax")
    return MoESpec(
        d_model=config.d_model,
        d_ffn=d_ffn,
        n_experts=n_experts,
        routing=Routing(
            top_k=top_k,
            scores=scores,
            normed=normed,
            scale=fields.number("routed_scaling_factor", 1.0),
            n_groups=n_groups if by_sigmoid else 1,
            n_groups_kept=n_kept if by_sigmoid else 1,
        ),
        choice_bias=CHOICE_BIAS if by_sigmoid else None,
        wide_router=True,
        shared=SharedSpec(name="shared_experts", d_ffn=d_ffn * n_shared) if n_shared else None,
    )


@dataclass(frozen=True, slots=True)
class Located:
    """A feed-forward layer whose tensors have other names in released files than where transformers has saved them."""

    ops: ClassVar[tuple[str, ...]] = MoESpec.ops
    adds_itself: ClassVar[bool] = False

    spec: FeedForwardSpec
    released: FeedForwardSpec
    place: str  # of the released tensors, below the block; "": the block itself
    marks: Sequence[str]  # of matrices below the block: any of them is there in released files alone

    def split(self, n: int) -> Located:
        """What each of n ranks computes. Raises `SettingError`."""
        return replace(self, spec=self.spec.split(n), released=self.released.split(n))

    def load(self, weights: TensorSource, name: str) -> FeedForward:
        """The layer whose tensors start with `name`, the block's name and `mlp`, or lie in the other place."""
        block = name.removesuffix(".mlp")
        if any(f"{block}.{one}.weight" in weights for one in self.marks):
            return self.released.load(weights, f"{block}.{self.place}".removesuffix("."))
        return self.spec.load(weights, name)
