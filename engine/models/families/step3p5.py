"""Step-3.5-Flash, and the text model of Step-3.7: full and sliding layers with other numbers of heads and another
rotation, a gate per head, experts beside a shared one, and in the last layers activations that are cut at a limit.

All norms are stored as what is added to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.engine.layers.attention import AttentionSpec
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec, FeedForwardSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.moe import CHOICE_BIAS, MoESpec, SharedSpec
from slipstream.engine.layers.norm import NormSpec
from slipstream.engine.models.families.routed_experts import DENSE, SPARSE, Located
from slipstream.engine.models.families.step_keys import MTP, per_layer
from slipstream.engine.models.reading.config import FULL, SLIDING, ModelConfig
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.models.reading.rotation import read_rope
from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.moe.op import Routing

# Config keys that other families must refuse.
UNDERSTOOD = ("layer_types", "n_routed_experts", "query_pre_attn_scalar")
DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-5}
HEADS = {FULL: "num_attention_heads", SLIDING: "num_sliding_attention_heads"}
# Keys that change the function computed, with the values under which it is the one that is here.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "att_impl_type": ("GQA",),
    "gating": (True, "per-head"),
    "mlp_bias": (False,),
    "moe_router_activation": ("sigmoid",),
    "norm_expert_weight": (True,),
    "sink": (False,),
    "sparse_attention_config": ({},),
    "use_bidirectional_attention": (False,),
    "use_head_wise_attn_gate": (True,),
    "use_moe": (True,),
    "use_moe_router_bias": (True,),
    "use_qk_norm": (True,),
    "zero_centered": (True,),
}


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of."""
    refuse(config)
    blocks = [block(config, i) for i in range(config.n_layers)]
    return config.decoder(
        blocks, norm=read_norm(config), mtp_block=lambda place: block(config, config.n_layers + place)
    )


def block(config: ModelConfig, i: int) -> BlockSpec:
    """The parts of layer i. Those from n_layers on are the layers of multi-token prediction.

    Raises `UnsupportedModel` naming key and value, also where the config does not say of what kind such a layer is.
    """
    kind, ffn = (
        layer_kind(config, key, known, i)
        for key, known in (("layer_types", (FULL, SLIDING)), ("mlp_layer_types", (DENSE, SPARSE)))
    )
    return BlockSpec(read_attention(config, kind), read_feed_forward(config, ffn, i))


def layer_kind(config: ModelConfig, key: str, known: tuple[str, ...], i: int) -> str:
    """What layer i is, of the kinds under a key; past the network's layers of those under `mtp_` and the key."""
    fields, place, n = config.fields, i, config.n_layers
    if i >= n:
        key, place, n = f"mtp_{key}", i - n, fields.count(MTP, 0, least=0)
    kinds = fields.names(key, known, n)
    if kinds is None or place >= n:
        raise fields.refuse(key, f"does not say what layer {i} is")
    return kinds[place]


def read_norm(config: ModelConfig) -> NormSpec:
    """Every norm's form."""
    return NormSpec(config.norm_eps, one_plus=True)


def read_attention(config: ModelConfig, kind: str) -> AttentionSpec:
    """The attention of one kind of layer. Raises `UnsupportedModel` naming key and value."""
    fields, is_full, key = config.fields, kind == FULL, HEADS[kind]
    n_heads = fields.count(key)
    if n_heads % config.n_kv_heads:
        raise fields.refuse(key, f"must be a multiple of the {config.n_kv_heads} key heads")
    return config.attention(
        n_heads=n_heads,
        head_norm=read_norm(config),
        gate="head",
        scale=fields.positive("query_pre_attn_scalar", config.d_head) ** -0.5,
        window=None if is_full else fields.count("sliding_window"),
        rope=config.rope if is_full else read_rope(fields, config.d_head, SLIDING),
    )


def read_feed_forward(config: ModelConfig, kind: str, i: int) -> FeedForwardSpec:
    """The feed-forward part of layer i, which is dense or has experts."""
    of_all = read_activation(config.fields, "swiglu_limits_shared", i)
    if kind == DENSE:
        return MLPSpec(config.d_model, config.d_ffn, activation=of_all)
    shared = SharedSpec(
        name="shared_experts", d_ffn=config.fields.count("share_expert_dim"), activation=of_all
    )
    of_experts = read_activation(config.fields, "swiglu_limits", i)
    experts = replace(read_experts(config), shared=shared, activation=of_experts)
    shared = replace(shared, name="share_expert")
    released = replace(
        experts, shared=shared, router="moe.gate", choice_bias="moe.router_bias", experts="moe"
    )
    return Located(experts, released, "", ("moe.gate",))


def read_experts(config: ModelConfig) -> MoESpec:
    """The experts of any layer. Raises `UnsupportedModel` naming key and value."""
    fields = config.fields
    n_experts, top_k = fields.experts("n_routed_experts", "num_experts_per_tok")
    scale = fields.positive("moe_router_scaling_factor", 1.0)
    return MoESpec(
        d_model=config.d_model,
        d_ffn=fields.count("moe_intermediate_size"),
        n_experts=n_experts,
        routing=Routing(top_k=top_k, scores="sigmoid", normed=True, scale=scale),
        choice_bias=CHOICE_BIAS,
        wide_router=fields.flag("need_fp32_gate", default=True),
    )


def read_activation(fields: Fields, key: str, i: int) -> Activation:
    """The activation of layer i, cut at a limit; 0 and null, and layers that a list does not reach: plain silu."""
    limits = per_layer(fields, key) if fields.has(key) else []
    for one in limits:
        is_number = isinstance(one, int | float) and not isinstance(one, bool)
        if one is not None and not (is_number and 0 <= one < math.inf):
            raise fields.refuse(key, "must be numbers of at least 0, or null")
    limit = limits[i] if i < len(limits) else None
    return Activation("limited", float(limit)) if limit else SILU


def refuse(config: ModelConfig) -> None:
    """Raise `UnsupportedModel` for what changes the function computed and is not here."""
    fields = config.fields
    for key, known in ONLY.items():
        if fields.has(key) and fields.values[key] not in known:
            raise fields.refuse(key, "not supported")
    turning = fields.values.get("use_rope_layers") or []
    if not isinstance(turning, list) or not all(one is True for one in turning):
        raise fields.refuse("use_rope_layers", "layers without rotation are not supported")
    refuse_other_heads(config)


def refuse_other_heads(config: ModelConfig) -> None:
    """Raise `UnsupportedModel` unless the heads that transformers lists for each layer are those of its kind."""
    fields, listed = config.fields, config.fields.child("per_layer_config")
    if not listed.values:
        return
    for i in range(config.n_layers):
        key = HEADS[layer_kind(config, "layer_types", (FULL, SLIDING), i)]
        own = {"num_attention_heads": config.n_heads, **listed.child(str(i)).values}
        if own != {"num_attention_heads": fields.values[key]}:
            raise fields.refuse(
                "per_layer_config", f"must give layer {i} the heads of {key}, and nothing else"
            )
