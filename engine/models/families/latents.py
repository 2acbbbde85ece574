"""What the families with latent attention read of their configs."""

from __future__ import annotations

import math

from slipstream.engine.layers.latent_attention import LatentAttentionSpec
from slipstream.engine.layers.norm import NormSpec
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.models.reading.config import ModelConfig

# Norms of latents have this whatever the config says of others: transformers', and equal to it in DeepSeek's own.
LATENT_EPS = 1e-6


def read_latent_attention(config: ModelConfig, rope: RopeSpec | None) -> LatentAttentionSpec:
    """The attention of all layers. rope: None for no rotation. Raises `UnsupportedModel` naming key and value."""
    fields = config.fields
    d_plain, d_rope = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        if fields.count(key) % 2:
            raise fields.refuse(key, "must be even")
    return LatentAttentionSpec(
        d_model=config.d_model,
        n_heads=config.n_heads,
        d_query_latent=fields.count("q_lora_rank") if fields.has("q_lora_rank") else None,
        d_latent=fields.count("kv_lora_rank"),
        d_plain=d_plain,
        d_rope=d_rope,
        d_value=fields.count("v_head_dim"),
        rope=rope,
        interleaved=fields.flag("rope_interleave", default=True),
        norm=NormSpec(LATENT_EPS),
        scale=(d_plain + d_rope) ** -0.5 * stretch(config) ** 2,
        bias=config.attention_bias,
    )


def stretch(config: ModelConfig) -> float:
    """By what queries and keys grow each where a rotation is stretched (YaRN with `mscale_all_dim`)."""
    fields = config.fields
    given = fields.child("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    share = given.number("mscale_all_dim", 0.0)
    return 0.1 * share * math.log(config.rope.factor) + 1.0 if share and config.rope.factor > 1 else 1.0
