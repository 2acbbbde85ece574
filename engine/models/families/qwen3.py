"""Qwen3 dense: the Llama block with an RMS norm on every query and key head before the rotation."""

from __future__ import annotations

from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.models.reading.config import ModelConfig


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of."""
    mlp = MLPSpec(config.d_model, config.d_ffn)
    blocks = [
        BlockSpec(config.attention(head_norm=config.norm, window=window), mlp) for window in config.windows
    ]
    return config.decoder(blocks)
