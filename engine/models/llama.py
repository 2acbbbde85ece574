"""Llama 3.x, and Mistral without a sliding window: the plain block, with biases only if the config asks."""

from __future__ import annotations

from engine.layers.decoder import BlockSpec, DecoderSpec
from engine.layers.mlp import MLPSpec
from engine.models.config import ModelConfig


def parts(config: ModelConfig, n_positions: int, vocab_size: int) -> DecoderSpec:
    """What a decoder of this family is made of."""
    attention = config.attention(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    block = BlockSpec(attention, MLPSpec(config.d_model, config.d_ffn, config.mlp_bias))
    return config.decoder([block] * config.n_layers, n_positions, vocab_size)
