"""Qwen3-MoE: the Qwen3 block, whose feed-forward layer is a mixture of experts in all layers or in every n-th."""

from __future__ import annotations

from engine.layers.decoder import BlockSpec, DecoderSpec
from engine.layers.mlp import MLPSpec
from engine.layers.norm import NormSpec
from engine.models.config import ModelConfig
from engine.models.softmax_experts import read_experts, sparse_layers

UNDERSTOOD = ("num_experts", "num_local_experts")  # keys that other families must refuse


def parts(config: ModelConfig, n_positions: int, vocab_size: int) -> DecoderSpec:
    """What a decoder of this family is made of."""
    attention = config.attention(
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norm=NormSpec(config.norm_eps),
    )
    dense, sparse = MLPSpec(config.d_model, config.d_ffn), read_experts(config, normed=False)
    blocks = [BlockSpec(attention, sparse if here else dense) for here in sparse_layers(config)]
    return config.decoder(blocks, n_positions, vocab_size)
