"""Qwen3-MoE: the Qwen3 block, whose feed-forward layer is a mixture of experts in all layers or in every n-th."""

from __future__ import annotations

from engine.layers.decoder import BlockSpec, DecoderSpec
from engine.layers.mlp import MLPSpec
from engine.layers.moe import MoESpec
from engine.layers.norm import NormSpec
from engine.models.config import ModelConfig
from engine.models.fields import Fields
from kernels.moe.op import Routing

UNDERSTOOD = ("num_experts", "num_local_experts")  # keys that other families must refuse


def parts(config: ModelConfig, n_positions: int, vocab_size: int) -> DecoderSpec:
    """What a decoder of this family is made of."""
    attention = config.attention(
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norm=NormSpec(config.norm_eps),
    )
    dense, sparse = MLPSpec(config.d_model, config.d_ffn), read_experts(config)
    is_sparse = sparse_layers(config.fields, config.n_layers)
    blocks = [BlockSpec(attention, sparse if here else dense) for here in is_sparse]
    return config.decoder(blocks, n_positions, vocab_size)


def read_experts(config: ModelConfig) -> MoESpec:
    """The mixture of experts. Raises `UnsupportedModel` naming key and value."""
    fields = config.fields
    n_experts = fields.count("num_experts" if fields.has("num_experts") else "num_local_experts")
    top_k = fields.count("num_experts_per_tok")
    if top_k > n_experts:
        raise fields.refuse("num_experts_per_tok", f"must be at most the number of experts, {n_experts}")
    return MoESpec(
        d_model=config.d_model,
        d_ffn=fields.count("moe_intermediate_size"),
        n_experts=n_experts,
        routing=Routing(top_k=top_k, scores="softmax", normed=fields.flag("norm_topk_prob", default=False)),
    )


def sparse_layers(fields: Fields, n_layers: int) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th but those in `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(one) is int and 0 <= one < n_layers for one in dense):
        raise fields.refuse("mlp_only_layers", f"must be a list of layers below {n_layers}")
    return [(i + 1) % step == 0 and i not in dense for i in range(n_layers)]
