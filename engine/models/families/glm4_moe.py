"""GLM-4.5 and 4.6: the Llama block with half of each head rotated, then experts beside a shared expert."""

from __future__ import annotations

from dataclasses import replace

from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.moe import MoESpec, SharedSpec
from slipstream.engine.layers.norm import NormSpec
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.engine.models.reading.fields import MOST_PARTS
from slipstream.kernels.moe.op import Routing

UNDERSTOOD = ("n_routed_experts", "num_local_experts")  # keys that other families must refuse


def parts(config: ModelConfig, n_positions: int, vocab_size: int) -> DecoderSpec:
    """What a decoder of this family is made of."""
    fields = config.fields
    attention = config.attention(
        rope=read_partial_rope(config),
        qkv_bias=config.attention_bias,  # the output has none whatever the config says
        head_norm=NormSpec(config.norm_eps) if fields.flag("use_qk_norm", default=False) else None,
    )
    dense, sparse = MLPSpec(config.d_model, config.d_ffn), read_experts(config)
    n_dense = fields.count("first_k_dense_replace", 1, least=0)
    blocks = [BlockSpec(attention, dense if i < n_dense else sparse) for i in range(config.n_layers)]
    return config.decoder(blocks, n_positions, vocab_size)


def read_partial_rope(config: ModelConfig) -> RopeSpec:
    """The rotary embedding; a config that does not say how much of a head is rotated means half."""
    fields, key = config.fields, "partial_rotary_factor"
    if fields.has(key) or fields.child("rope_parameters").has(key):
        return config.rope
    return replace(config.rope, n_dims=config.d_head // 2)


def read_experts(config: ModelConfig) -> MoESpec:
    """The mixture of experts. Raises `UnsupportedModel` naming key and value."""
    fields = config.fields
    n_experts, top_k = fields.count("n_routed_experts", most=MOST_PARTS), fields.count("num_experts_per_tok")
    n_groups, n_kept = fields.count("n_group", 1), fields.count("topk_group", 1)
    if n_experts % n_groups or (n_groups > 1 and n_experts < 2 * n_groups):
        raise fields.refuse("n_group", f"must divide {n_experts} experts into groups of at least two")
    if n_kept > n_groups:
        raise fields.refuse("topk_group", f"must be at most n_group = {n_groups}")
    if top_k > n_experts // n_groups * n_kept:
        raise fields.refuse("num_experts_per_tok", f"{n_kept} groups of {n_experts // n_groups} hold fewer")
    d_ffn, n_shared = fields.count("moe_intermediate_size"), fields.count("n_shared_experts", 1, least=0)
    return MoESpec(
        d_model=config.d_model,
        d_ffn=d_ffn,
        n_experts=n_experts,
        routing=Routing(
            top_k=top_k,
            scores="sigmoid",
            normed=fields.flag("norm_topk_prob", default=True),
            scale=fields.number("routed_scaling_factor", 1.0),
            n_groups=n_groups,
            n_groups_kept=n_kept,
        ),
        biased=True,
        wide_router=True,
        shared=SharedSpec(name="shared_experts", d_ffn=d_ffn * n_shared) if n_shared else None,
    )
