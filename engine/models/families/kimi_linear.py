"""Kimi-Linear: three layers of Kimi Delta Attention to one of latent attention without rotation, then experts.

Source: Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.engine.cache.recurrent import Recurrent
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec, MixerSpec
from slipstream.engine.layers.kimi_delta import KimiDeltaSpec
from slipstream.engine.models.families.latents import read_latent_attention
from slipstream.engine.models.families.routed_experts import Located, feed_forwards, read_experts
from slipstream.engine.models.reading.config import FULL, ModelConfig
from slipstream.engine.models.reading.fields import Fields

UNDERSTOOD = ("layer_types", "num_experts", "num_local_experts")  # keys that other families must refuse
# What transformers assumes of keys that are left out.
DEFAULTS: Mapping[str, Any] = {
    "num_experts": 256,
    "num_experts_per_token": 8,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
}
LINEAR = "linear_attention"  # of `layer_types`
# Where released files have experts; transformers writes dense layers there too.
OTHER, OTHER_MARKS = "block_sparse_moe", ("block_sparse_moe.gate", "block_sparse_moe.gate_proj")
# What released files call the keys of other families.
RENAMED = {
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_group": ("num_expert_group",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_shared_experts": ("num_shared_experts",),
    "scoring_func": ("moe_router_activation_func",),
}


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of."""
    config = replace(config, fields=with_common_names(config.fields))
    fields = config.fields
    if not fields.flag("mla_use_nope", default=True):
        raise fields.refuse("mla_use_nope", "latent attention with a rotation is not supported here")
    mixers: dict[str, MixerSpec] = {
        FULL: read_latent_attention(config, None),
        LINEAR: KimiDeltaSpec(d_model=config.d_model, need=read_state(fields), eps=config.norm_eps),
    }
    ffns = [Located(ffn, ffn, OTHER, OTHER_MARKS) for ffn in feed_forwards(config, read_experts(config))]
    blocks = [BlockSpec(mixers[kind], ffn) for kind, ffn in zip(layer_kinds(config), ffns, strict=True)]
    return config.decoder(blocks)


def with_common_names(fields: Fields) -> Fields:
    """The same with what other families call these keys."""
    values = dict(fields.values)
    for common, others in RENAMED.items():
        given = [values[one] for one in (common, *others) if values.get(one) is not None]
        if given:
            values[common] = given[0]
    return Fields(values, fields.where)


def read_state(fields: Fields) -> Recurrent:
    """The state of a recurrent layer. Raises `UnsupportedModel` naming key and value."""
    given = fields.child("linear_attn_config")
    n_heads = given.count("num_heads", fields.count("linear_num_heads", 32))
    d_head = given.count("head_dim", fields.count("linear_head_dim", 128))
    return Recurrent(
        n_key_heads=n_heads,
        n_value_heads=n_heads,
        d_key=d_head,
        d_value=d_head,
        conv_width=given.count("short_conv_kernel_size", fields.count("linear_conv_kernel_dim", 4)),
        decays_by_key=True,
    )


def layer_kinds(config: ModelConfig) -> list[str]:
    """`full_attention` or `linear_attention` per layer: listed, or in lists of numbers that begin at 1."""
    fields, n = config.fields, config.n_layers
    kinds, given = fields.names("layer_types", (FULL, LINEAR), n), fields.child("linear_attn_config")
    if kinds is None:
        full = given.values.get("full_attn_layers")
        if not isinstance(full, list) or not all(type(one) is int and 1 <= one <= n for one in full):
            raise given.refuse("full_attn_layers", f"must be a list of layers from 1 to {n}")
        kinds = [FULL if i + 1 in full else LINEAR for i in range(n)]
    return kinds
