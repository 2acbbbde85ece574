"""Gemma 3: five sliding layers to a full one, each kind with its own rotation, and norms on both ends of every half.

Of the released wrapper checkpoints the text model is read. All norms are stored as what is added to 1.
"""

from __future__ import annotations

from typing import Any

from slipstream.engine.layers.attention import AttentionSpec
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.norm import SANDWICH_NORMS, NormSpec
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.models.reading.config import SLIDING, ModelConfig, refuse_other_activations
from slipstream.engine.models.reading.rotation import read_rope
from slipstream.kernels.gated.activation import GELU

# Config keys that other families must refuse.
UNDERSTOOD = ("layer_types", "hidden_act", "hidden_activation", "query_pre_attn_scalar")
# What transformers assumes of the keys that released wrappers leave out.
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of."""
    fields, norm = config.fields, NormSpec(config.norm_eps, one_plus=True)
    refuse_other_activations(fields)
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.refuse("use_bidirectional_attention", "not supported")
    scale = fields.positive("query_pre_attn_scalar", 256.0) ** -0.5
    sliding, mlp = sliding_rope(config), MLPSpec(config.d_model, config.d_ffn, activation=GELU)

    def attention(window: int | None) -> AttentionSpec:
        return config.attention(
            head_norm=norm,
            scale=scale,
            window=window,
            rope=config.rope if window is None else sliding,
        )

    blocks = [BlockSpec(attention(window), mlp, SANDWICH_NORMS) for window in config.windows]
    return config.decoder(blocks, norm=norm, embedding_scale=config.d_model**0.5)


def sliding_rope(config: ModelConfig) -> RopeSpec:
    """The rotation of sliding layers: stored beside that of full layers, or in older files a base alone."""
    given = config.fields.child("rope_parameters")
    if given.has(SLIDING):
        return read_rope(config.fields, config.d_head, SLIDING)
    theta = config.fields.positive("rope_local_base_freq", 1e4)
    return RopeSpec(kind="default", theta=theta, n_dims=config.d_head)
