"""Gemma 4: heads of two widths, inputs of each layer, layers that read the keys and values of others.

Of the released wrapper checkpoints the text model is read. Norms are multiplied before rounding; scores are not scaled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.engine.layers.attention import AttentionSpec
from slipstream.engine.layers.block_end import BlockEndSpec, LayerInputsSpec
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec, MixerSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.moe import MoESpec
from slipstream.engine.layers.norm import SANDWICH_NORMS, NormSpec
from slipstream.engine.layers.parallel_experts import ParallelExpertsSpec
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.layers.shared_attention import SharedAttentionSpec
from slipstream.engine.models.reading.config import FULL, SLIDING, ModelConfig, refuse_other_activations
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.models.reading.rotation import read_rope
from slipstream.kernels.gated.activation import GELU
from slipstream.kernels.moe.op import Routing

# Config keys that other families must refuse.
UNDERSTOOD = ("layer_types", "hidden_act", "hidden_activation", "final_logit_softcapping", "num_experts")
# What transformers assumes of the keys that released wrappers leave out.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_144,
}
ROPES: dict[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
BESIDE_EXPERTS = replace(SANDWICH_NORMS, before_ffn=None)


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of."""
    fields, norm = config.fields, NormSpec(config.norm_eps, wide=True)
    refuse(fields)
    windows, d_input = config.windows, fields.count("hidden_size_per_layer_input", 0, least=0)
    full, sliding = (
        read_attention(config, norm, window) for window in (None, fields.count("sliding_window"))
    )
    sources = read_sources(config)
    end = BlockEndSpec(config.d_model, d_input, norm)
    is_double = fields.flag("use_double_wide_mlp", default=False)
    moe = read_experts(config) if fields.flag("enable_moe_block", default=False) else None
    blocks = []
    for window, source in zip(windows, sources, strict=True):
        own = full if window is None else sliding
        mixer: MixerSpec = own if source is None else SharedAttentionSpec(own, source)
        width = config.d_ffn * (2 if is_double and source is not None else 1)
        dense = MLPSpec(config.d_model, width, activation=GELU)
        if moe is None:
            blocks.append(BlockSpec(mixer, dense, SANDWICH_NORMS, end))
        else:
            blocks.append(BlockSpec(mixer, ParallelExpertsSpec(dense, moe, norm), BESIDE_EXPERTS, end))
    inputs = None
    if d_input:
        rows = fields.count("vocab_size_per_layer_input", config.vocab_rows)
        pad_id = fields.count("pad_token_id", 0, least=0)
        inputs = LayerInputsSpec(config.d_model, d_input, config.n_layers, rows, norm, pad_id)
    return config.decoder(
        blocks,
        norm=norm,
        embedding_scale=config.d_model**0.5,
        logit_cap=fields.positive("final_logit_softcapping")
        if fields.has("final_logit_softcapping")
        else None,
        layer_inputs=inputs,
    )


def read_experts(config: ModelConfig) -> MoESpec:
    """The experts beside each dense part. Raises `UnsupportedModel` naming key and value."""
    fields = config.fields
    n_experts, top_k = fields.experts("num_experts", "top_k_experts")
    return MoESpec(
        d_model=config.d_model,
        d_ffn=fields.count("moe_intermediate_size"),
        n_experts=n_experts,
        routing=Routing(top_k=top_k, scores="softmax", normed=True),
        activation=GELU,
    )


def refuse(fields: Fields) -> None:
    """Raise `UnsupportedModel` for what changes the function computed and is not here."""
    refuse_other_activations(fields)
    # Between the tokens of an image only.
    if fields.text("use_bidirectional_attention", "vision") != "vision":
        raise fields.refuse("use_bidirectional_attention", "not supported")


def read_heads(config: ModelConfig) -> tuple[int, int]:
    """How wide heads of full layers are, and how many those of keys: listed layer by layer, or under their own keys.

    Raises `UnsupportedModel`.
    """
    fields, listed = config.fields, config.fields.child("per_layer_config")
    if fields.has("per_layer_config"):  # empty where full layers have the heads of the others
        found = set()
        for i, window in enumerate(config.windows):
            if window is None:
                name = next((key for key in listed.values if key.isdecimal() and int(key) == i), None)
                own = listed.child(name) if name is not None else Fields({}, listed.where)
                d_head = own.count("head_dim", config.d_head)
                found.add((d_head, own.count("num_key_value_heads", config.n_kv_heads)))
        if len(found) > 1:
            raise fields.refuse("per_layer_config", "must give all full layers heads of one shape")
        return found.pop() if found else (config.d_head, config.n_kv_heads)
    n_kv_heads = config.n_kv_heads
    if fields.flag("attention_k_eq_v", default=False):
        n_kv_heads = fields.count("num_global_key_value_heads", n_kv_heads)
    return fields.count("global_head_dim", 512), n_kv_heads


def read_attention(config: ModelConfig, norm: NormSpec, window: int | None) -> AttentionSpec:
    """The attention of full layers, or of those with that window."""
    fields, d_head, n_kv_heads = config.fields, config.d_head, config.n_kv_heads
    if window is None:
        d_head, n_kv_heads = read_heads(config)
        if config.n_heads % n_kv_heads:
            raise fields.refuse("num_global_key_value_heads", f"must divide {config.n_heads} heads")
    return config.attention(
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        rope=read_rotation(fields, d_head, FULL if window is None else SLIDING),
        head_norm=norm,
        norms_values=True,
        keys_as_values=window is None and fields.flag("attention_k_eq_v", default=False),
        scale=1.0,
        window=window,
    )


def read_rotation(fields: Fields, d_head: int, kind: str) -> RopeSpec:
    """The rotation of one kind of layer; what a config leaves out is as released."""
    given = fields.values if fields.has("rope_parameters") else {**fields.values, "rope_parameters": ROPES}
    return read_rope(Fields(given, fields.where), d_head, kind)


def read_sources(config: ModelConfig) -> list[int | None]:
    """Per layer the one whose keys and values it reads; None: its own. The last layers read those of the last of their
    kind that has its own."""
    fields, windows, n = config.fields, config.windows, config.n_layers
    n_own = n - fields.count("num_kv_shared_layers", 0, least=0)
    last = {window: i for i, window in enumerate(windows[: max(n_own, 0)])}
    if any(window not in last for window in windows):
        raise fields.refuse("num_kv_shared_layers", "leaves a kind of layer without keys and values")
    return [None if i < n_own else last[window] for i, window in enumerate(windows)]
