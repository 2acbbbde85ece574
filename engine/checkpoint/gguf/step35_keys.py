"""The metadata of Step-3.5-Flash: heads and rotations by kind of layer, activations that are cut at a limit."""

from __future__ import annotations

from slipstream.engine.checkpoint.gguf.config_parts import (
    FULL,
    ROPE_FACTORS,
    SLIDING,
    Config,
    by_kind,
    experts,
    experts_scale,
    listed_windows,
    read_factors,
    sliding_layers,
    sparse_layers,
    unscaled_rope,
)
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.errors import UnsupportedModel

NO_LIMIT = 1e-6  # up to here llama.cpp takes a limit for none


def step35(keys: Keys) -> Config:
    """Raises `UnsupportedModel` naming key and value, or `LoadError` for what is missing.

    Lists go on with the layers of prediction that the file counts.
    """
    refuse(keys)
    n_layers, n_all = keys.n_layers, keys.count("block_count")
    slides = sliding_layers(keys, n_all)
    sliding, full = by_kind(keys, "attention.head_count", slides)
    return {
        **listed_windows(keys, slides),
        **experts(keys, "n_routed_experts"),
        "mlp_layer_types": sparse_layers(keys, range(n_all)),
        "num_hidden_layers": n_layers,
        "num_attention_heads": full,
        "num_sliding_attention_heads": sliding,
        "num_key_value_heads": keys.count("attention.head_count_kv"),
        "rope_parameters": rotations(keys),
        "share_expert_dim": keys.count("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": experts_scale(keys),
        "swiglu_limits": limits(keys, "swiglu_clamp_exp", n_all),
        "swiglu_limits_shared": limits(keys, "swiglu_clamp_shexp", n_all),
    }


def refuse(keys: Keys) -> None:
    """Raise `UnsupportedModel` for another choice of experts than the family's."""
    if keys.count("expert_gating_func", 0) not in (0, 2):
        raise keys.refuse("expert_gating_func", "only 2, a sigmoid, is supported")
    if not keys.flag("expert_weights_norm", default=False):  # as llama.cpp reads a file that does not say
        raise keys.refuse("expert_weights_norm", "only true is supported")


def rotations(keys: Keys) -> Config:
    """Of each kind of layer. In full layers llama.cpp turns half of what the file says, and may stretch it."""
    d_head = keys.d_head
    n_whole = keys.count("rope.dimension_count", d_head)
    n_full, n_sliding = n_whole // 2, keys.count("rope.dimension_count_swa", n_whole)
    full = unscaled_rope(keys, FULL, d_head, n_full)
    if ROPE_FACTORS in keys.tensors:
        stored, n = keys.tensor(ROPE_FACTORS), max(n_full, n_sliding) // 2
        divisors = read_factors(stored)
        if len(divisors) != n:
            raise UnsupportedModel(f"{stored.where} has {len(divisors)} numbers, must have {n}")
        # What follows is for no layer: only full ones are stretched.
        full |= {"rope_type": "divided", "divisors": divisors[: n_full // 2]}
    return {FULL: full, SLIDING: unscaled_rope(keys, SLIDING, d_head, n_sliding)}


def limits(keys: Keys, name: str, n: int) -> list[float] | None:
    """Where the activation of each layer is cut, 0 for nowhere; None if no layer's is."""
    if not keys.has(name):
        return None
    found = keys.numbers(name, n)
    if any(one < 0 for one in found):
        raise keys.refuse(name, "must be numbers of at least 0")
    return [one if one > NO_LIMIT else 0.0 for one in found]
