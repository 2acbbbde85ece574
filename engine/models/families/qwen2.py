"""Qwen2 and Qwen2.5, and MiMo-7B: the Llama block with a bias on q, k and v, whatever the config says of biases."""

from __future__ import annotations

from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.models.reading.config import ModelConfig


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of."""
    mlp = MLPSpec(config.d_model, config.d_ffn)
    blocks = [
        BlockSpec(config.attention(qkv_bias=True, out_bias=False, window=window), mlp)
        for window in config.windows
    ]
    return config.decoder(blocks)
