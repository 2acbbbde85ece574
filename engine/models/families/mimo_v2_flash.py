"""MiMo-V2-Flash: windows with sinks among full layers, value heads narrower than key heads, no shared expert.

Configs come in two dialects: that of the released files, and that of transformers, which has lists of names where the
other has lists of 0 and 1, and keys of sliding layers only where they differ from what follows from full ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.engine.layers.attention import AttentionSpec
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec, FeedForwardSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.norm import NormNames
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.models.families.routed_experts import DENSE, SPARSE, read_experts
from slipstream.engine.models.reading.config import FULL, SLIDING, ModelConfig
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.models.reading.rotation import read_rope

UNDERSTOOD = ("layer_types", "n_routed_experts", "num_local_experts")  # keys that other families must refuse
# What transformers assumes of keys that are left out.
DEFAULTS: dict[str, Any] = {
    "n_shared_experts": 0,
    "partial_rotary_factor": 0.334,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e6,
}
VALUE_SCALE = 0.707  # likewise, but null is another value


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of. Raises `UnsupportedModel` naming key and value."""
    fields, n = config.fields, config.n_layers
    config = replace(config, norm_eps=fields.positive("layernorm_epsilon", config.norm_eps))
    kinds = read_kinds(fields, ("layer_types", "hybrid_layer_pattern"), (FULL, SLIDING), n)
    halves = read_kinds(fields, ("mlp_layer_types", "moe_layer_freq"), (DENSE, SPARSE), n)
    mixers = {kind: read_attention(config, kind) for kind in set(kinds)}
    dense, sparse = MLPSpec(config.d_model, config.d_ffn), read_experts(config)
    ffns: dict[str, FeedForwardSpec] = {DENSE: dense, SPARSE: sparse}
    blocks = [BlockSpec(mixers[kind], ffns[half]) for kind, half in zip(kinds, halves, strict=True)]
    mtp = BlockSpec(read_attention(config, SLIDING), dense, NormNames(before_ffn="pre_mlp_layernorm"))
    return config.decoder(blocks, mtp_block=lambda place: mtp)


def read_kinds(fields: Fields, keys: tuple[str, str], names: Sequence[str], n: int) -> list[str]:
    """One of two names for each of n layers. keys: of a list of the names, and of one of 0 and 1 for them."""
    named, numbered = keys
    kinds = fields.names(named, names, n)
    if kinds is not None:
        return kinds
    numbers = fields.values.get(numbered)
    if (
        not isinstance(numbers, list)
        or len(numbers) != n
        or any(type(one) is not int or one not in (0, 1) for one in numbers)
    ):
        raise fields.refuse(numbered, f"must be 0 ({names[0]}) or 1 ({names[1]}) for {n} layers")
    return [names[one] for one in numbers]


def read_window(fields: Fields) -> int:
    """Positions that a row of a sliding layer sees, its own included.

    Sources disagree about the released files, which say 128 under both keys: the code beside the weights and vLLM let
    a row see 128 positions, its own included; SGLang and transformers take `sliding_window_size` for those before its
    own, 129 in all. Read as transformers does, which writes that sum as `sliding_window` into its own files. A config
    without `sliding_window_size` has the window that `sliding_window` says.
    """
    before = "sliding_window_size"
    return fields.count(before) + 1 if fields.has(before) else fields.count("sliding_window")


def read_heads(config: ModelConfig, kind: str) -> dict[str, int]:
    """The heads of full or of sliding layers, as `AttentionSpec` has them."""
    fields, n, n_kv, d_key = config.fields, config.n_heads, config.n_kv_heads, config.d_head
    d_value, prefix = fields.count("v_head_dim", d_key), ""
    if kind == SLIDING:
        prefix = "swa_"
        n = fields.count("swa_num_attention_heads", n)
        n_kv = fields.count("swa_num_key_value_heads", 2 * n_kv)
        d_key, d_value = fields.count("swa_head_dim", d_key), fields.count("swa_v_head_dim", d_value)
    if n % n_kv:
        raise fields.refuse(f"{prefix}num_key_value_heads", f"{n_kv} must divide {n} query heads of {kind}")
    if d_value > d_key:
        raise fields.refuse(f"{prefix}v_head_dim", f"{d_value} must be at most the width of keys, {d_key}")
    return {"n_heads": n, "n_kv_heads": n_kv, "d_head": d_key, "d_value": d_value}


def read_attention(config: ModelConfig, kind: str) -> AttentionSpec:
    """The attention of full or of sliding layers."""
    fields, heads, slides = config.fields, read_heads(config, kind), kind == SLIDING
    which = "swa" if slides else "full"
    has_sinks = fields.flag(f"add_{which}_attention_sink_bias", default=slides)
    key = "attention_value_scale"
    assumed = None if key in fields.values else VALUE_SCALE  # null means that values stay as they are
    return config.attention(
        **heads,
        rope=sliding_rope(config, heads["d_head"]) if slides else config.rope,
        out_bias=False,  # whatever the config says
        window=read_window(fields) if slides else None,
        sinks="attention_sink_bias" if has_sinks else None,
        value_scale=fields.positive(key) if fields.has(key) else assumed,
    )


def sliding_rope(config: ModelConfig, d_head: int) -> RopeSpec:
    """The rotation of sliding layers: beside that of full layers, or in the released dialect a base alone."""
    fields = config.fields
    if fields.child("rope_parameters").has(SLIDING):
        return read_rope(fields, d_head, SLIDING)
    theta = fields.positive("swa_rope_theta", 1e4)
    return read_rope(Fields({**fields.values, "rope_theta": theta}, fields.where), d_head)
