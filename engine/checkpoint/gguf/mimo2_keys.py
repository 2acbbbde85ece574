"""The metadata of MiMo-V2-Flash: layers with and without a window, values narrower than keys."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.checkpoint.gguf.config_parts import (
    FULL,
    SLIDING,
    Config,
    by_kind,
    experts,
    refuse_other_gating,
    sliding_layers,
    sparse_layers,
    unscaled_rope,
)
from slipstream.engine.checkpoint.gguf.keys import Keys


def mimo2(keys: Keys) -> Config:
    """Raises `UnsupportedModel` naming key and value, or `LoadError` for what is missing."""
    n_layers, slides = keys.n_layers, sliding_layers(keys, keys.count("block_count"))
    if not all(slides[n_layers:]):
        raise keys.refuse("attention.sliding_window_pattern", "layers of prediction must have a window")
    refuse_other_gating(keys)
    d_key, (sliding, full) = keys.d_key, by_kind(keys, "attention.head_count_kv", slides)
    n_dims = keys.count("rope.dimension_count", d_key)
    return {
        **experts(keys, "n_routed_experts"),
        "layer_types": [SLIDING if one else FULL for one in slides[:n_layers]],
        "mlp_layer_types": sparse_layers(keys, range(n_layers)),
        "num_key_value_heads": full,
        "swa_num_key_value_heads": sliding,
        "head_dim": d_key,
        "v_head_dim": keys.d_value,
        "rope_parameters": {kind: unscaled_rope(keys, kind, d_key, n_dims) for kind in (FULL, SLIDING)},
        "attention_value_scale": value_scale(keys),
        "add_full_attention_sink_bias": has_sinks(keys, slides, of=False),
        "add_swa_attention_sink_bias": has_sinks(keys, slides, of=True),
        **window(keys),
    }


def window(keys: Keys) -> Config:
    """The window as the released config has it, under both of its keys.

    The file holds the released config's `sliding_window`. llama.cpp lets a row see so many positions, its own
    included; transformers takes the `sliding_window_size` beside it, which is the same number, for those before its
    own. A file cannot say which of them its writer meant: it is read as the folder that it was made of.
    """
    n = keys.count("attention.sliding_window")
    if not n:
        raise keys.refuse("attention.sliding_window", "must be above 0")
    return {"sliding_window": n, "sliding_window_size": n}


def value_scale(keys: Keys) -> float | None:
    """What values are multiplied by; 0 stands for 1 in llama.cpp."""
    scale = keys.number("attention.value_scale", 1.0)
    if scale < 0:
        raise keys.refuse("attention.value_scale", "must be at least 0")
    return None if scale in (0.0, 1.0) else scale


def has_sinks(keys: Keys, slides: Sequence[bool], *, of: bool) -> bool:
    """Whether layers with a window (of) or those without have sinks."""
    return any(one is of and f"blk.{i}.attn_sinks.weight" in keys.tensors for i, one in enumerate(slides))
