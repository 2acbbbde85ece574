"""GLM-4.5, 4.6 and 4.7: the Llama block with half of each head rotated, then experts beside a shared expert."""

from __future__ import annotations

from dataclasses import replace

from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.models.families.routed_experts import feed_forwards, read_experts
from slipstream.engine.models.reading.config import ModelConfig

UNDERSTOOD = ("n_routed_experts", "num_local_experts")  # keys that other families must refuse
DEFAULTS = {"rms_norm_eps": 1e-5}  # what transformers assumes of a key that is left out


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of."""
    attention = config.attention(
        rope=read_partial_rope(config),
        out_bias=False,  # whatever the config says
        head_norm=config.norm if config.fields.flag("use_qk_norm", default=False) else None,
    )
    blocks = [BlockSpec(attention, ffn) for ffn in feed_forwards(config, read_experts(config))]
    return config.decoder(blocks)


def read_partial_rope(config: ModelConfig) -> RopeSpec:
    """The rotary embedding; a config that does not say how much of a head is rotated means half."""
    fields, key = config.fields, "partial_rotary_factor"
    if fields.has(key) or fields.child("rope_parameters").has(key):
        return config.rope
    return replace(config.rope, n_dims=config.d_head // 2)
