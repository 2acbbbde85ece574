"""Qwen3 dense: the Llama block with an RMS norm on every query and key head before the rotation."""

from __future__ import annotations

from engine.layers.decoder import BlockSpec, DecoderSpec
from engine.layers.mlp import MLPSpec
from engine.layers.norm import NormSpec
from engine.models.config import ModelConfig


def parts(config: ModelConfig, n_positions: int, vocab_size: int) -> DecoderSpec:
    """What a decoder of this family is made of."""
    attention = config.attention(
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norm=NormSpec(config.norm_eps),
    )
    block = BlockSpec(attention, MLPSpec(config.d_model, config.d_ffn))
    return config.decoder([block] * config.n_layers, n_positions, vocab_size)
