"""Qwen3-MoE: the Qwen3 block, whose feed-forward layer is a mixture of experts in all layers or in every n-th."""

from __future__ import annotations

from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.norm import NormSpec
from slipstream.engine.models.families.softmax_experts import read_experts, sparse_layers
from slipstream.engine.models.reading.config import ModelConfig

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
