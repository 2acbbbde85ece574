"""Qwen3-MoE: the Qwen3 block, whose feed-forward layer is a mixture of experts in all layers or in every n-th."""

from __future__ import annotations

from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.models.families.softmax_experts import feed_forwards, read_experts
from slipstream.engine.models.reading.config import ModelConfig

UNDERSTOOD = ("num_experts", "num_local_experts")  # keys that other families must refuse


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of."""
    attention, experts = config.attention(head_norm=config.norm), read_experts(config, normed=False)
    blocks = [BlockSpec(attention, ffn) for ffn in feed_forwards(config, experts)]
    return config.decoder(blocks)
