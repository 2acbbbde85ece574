"""Qwen3-Next, Qwen3.5 and Qwen3.6, dense and with experts: gated-delta layers, every fourth layer gated attention.

Of the released wrapper checkpoints the text model is read. All norms are stored as what is added to 1, except the
norm within a gated-delta layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from slipstream.engine.cache.recurrent import Recurrent
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec, FeedForwardSpec, MixerSpec
from slipstream.engine.layers.gated_delta import GatedDeltaSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.moe import SharedSpec
from slipstream.engine.layers.norm import NormSpec
from slipstream.engine.models.families.sections import sectioned
from slipstream.engine.models.families.softmax_experts import feed_forwards, read_experts
from slipstream.engine.models.reading.config import ModelConfig

# Config keys that other families must refuse.
UNDERSTOOD = ("layer_types", "num_experts", "attn_output_gate")
# What transformers assumes of a key that is left out.
DEFAULTS: dict[str, Any] = {"partial_rotary_factor": 0.25}
in_turns = sectioned([11, 11, 10], interleaved=True)  # Qwen3.5


def parts(config: ModelConfig, *, grouped: bool) -> DecoderSpec:
    """What a decoder of this family is made of. grouped: how the projections of gated-delta layers are stored."""
    norm = NormSpec(config.norm_eps, one_plus=True)
    fields = config.fields
    if not fields.flag("attn_output_gate", default=True):
        raise fields.refuse("attn_output_gate", "attention without an output gate is not supported")
    mixers: dict[str, MixerSpec] = {
        "full_attention": config.attention(head_norm=norm, gate="element"),
        "linear_attention": GatedDeltaSpec(
            d_model=config.d_model, need=read_state(config), eps=config.norm_eps, grouped=grouped
        ),
    }
    ffns = read_feed_forwards(config, always_normed=not grouped)
    blocks = [BlockSpec(mixers[kind], ffn) for kind, ffn in zip(layer_kinds(config), ffns, strict=True)]
    return config.decoder(blocks, norm=norm)


qwen3_5 = partial(parts, grouped=False)
qwen3_next = partial(parts, grouped=True)


def layer_kinds(config: ModelConfig) -> list[str]:
    """`full_attention` or `linear_attention` per layer: listed, or every n-th layer full."""
    fields, n_layers = config.fields, config.n_layers
    kinds = fields.names("layer_types", ("full_attention", "linear_attention"), n_layers)
    if kinds is None:
        interval = fields.count("full_attention_interval", 4)
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(n_layers)]
    return kinds


def read_feed_forwards(config: ModelConfig, *, always_normed: bool) -> list[FeedForwardSpec]:
    """Per layer, the dense part or experts with a shared expert. Raises `UnsupportedModel` naming key and value.

    always_normed: weights of experts sum to 1 whatever the config says.
    """
    fields = config.fields
    if not fields.values.get("num_experts"):
        return [MLPSpec(config.d_model, config.d_ffn)] * config.n_layers
    d_shared = fields.count("shared_expert_intermediate_size")
    shared = SharedSpec(name="shared_expert", d_ffn=d_shared, gated=True)
    return feed_forwards(config, read_experts(config, normed=True, always=always_normed, shared=shared))


def read_state(config: ModelConfig) -> Recurrent:
    """The shape of the recurrent state. Raises `UnsupportedModel` naming key and value."""
    fields = config.fields
    n_key_heads, n_value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    if n_value_heads % n_key_heads:
        raise fields.refuse("linear_num_value_heads", f"must be a multiple of the {n_key_heads} key heads")
    if fields.text("output_gate_type", "swish") not in ("swish", "silu"):
        raise fields.refuse("output_gate_type", "must be swish")
    return Recurrent(
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        d_key=fields.count("linear_key_head_dim"),
        d_value=fields.count("linear_value_head_dim"),
        conv_width=fields.count("linear_conv_kernel_dim", 4, least=2),
    )
