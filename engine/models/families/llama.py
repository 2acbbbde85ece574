"""Llama 3.x and Mistral: the plain block, with biases only if the config asks."""

from __future__ import annotations

from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.models.reading.config import ModelConfig


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of."""
    mlp = MLPSpec(config.d_model, config.d_ffn, config.mlp_bias)
    blocks = [BlockSpec(config.attention(window=window), mlp) for window in config.windows]
    return config.decoder(blocks)
