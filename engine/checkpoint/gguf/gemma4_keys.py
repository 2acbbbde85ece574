"""The metadata of Gemma 4: two kinds of layers with heads of their own, and layers without keys and values.

And that of its assistant, all of whose layers are of the last kind.
"""

from __future__ import annotations

from slipstream.engine.checkpoint.gguf.config_parts import (
    FULL,
    ROPE_FACTORS,
    SLIDING,
    Config,
    by_kind,
    listed_windows,
    read_factors,
    share,
    sliding_layers,
    unscaled_rope,
)
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.errors import UnsupportedModel

LAYER_INPUTS = "per_layer_token_embd.weight"
STANDS = 1e30  # what the frequencies that do not turn are divided by


def gemma4(keys: Keys) -> Config:
    """Raises `UnsupportedModel` naming key and value, or `LoadError` for what is missing."""
    slides = sliding_layers(keys, keys.n_layers)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        **listed_windows(keys, slides),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": rotations(keys),
        **heads(keys, slides),
        **shared_layers(keys, slides),
        **layer_inputs(keys),
        **experts_beside(keys),
    }


def gemma4_assistant(keys: Keys) -> Config:
    """Layers with queries alone, for which the target's keys and values stand.

    All of them count as layers of prediction. Raises as `gemma4`. A file has no clusters of tokens: converters leave
    them out, and guesses look at all tokens.
    """
    keys.heeded.add("final_logit_softcapping")  # no assistant caps its logits, whatever the file says of that
    n_layers = keys.count("block_count")
    if keys.n_layers:  # those that are no layers of prediction
        raise keys.refuse("nextn_predict_layers", f"must be block_count = {n_layers}")
    if keys.count("attention.shared_kv_layers", n_layers) != n_layers:
        raise keys.refuse("attention.shared_kv_layers", f"must be block_count = {n_layers}")
    if keys.count("expert_count", 0):
        raise keys.refuse("expert_count", "an assistant has no experts")
    slides = sliding_layers(keys, n_layers)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "backbone_hidden_size": keys.count("embedding_length_out"),
        "num_hidden_layers": n_layers,
        "num_nextn_predict_layers": None,
        "num_kv_shared_layers": n_layers,
        "hidden_size_per_layer_input": 0,
        **listed_windows(keys, slides),
        "rope_parameters": rotations(keys),
        **heads(keys, slides),
    }


def heads(keys: Keys, slides: list[bool]) -> Config:
    """Their widths and numbers, one of each for every kind of layer."""
    sliding, full = by_kind(keys, "attention.head_count_kv", slides)
    wide = {"head_dim": keys.d_head, "num_key_value_heads": full}
    return {
        "head_dim": sliding_width(keys),
        "global_head_dim": keys.d_head,
        "num_key_value_heads": sliding,
        "per_layer_config": {str(i): wide for i, one in enumerate(slides) if not one},
    }


def sliding_width(keys: Keys) -> int:
    """Width of a head in layers with a window."""
    d_head = keys.count("attention.key_length_swa")
    if keys.count("attention.value_length_swa", d_head) != d_head:
        raise keys.refuse("attention.value_length_swa", f"must be attention.key_length_swa = {d_head}")
    return d_head


def shared_layers(keys: Keys, slides: list[bool]) -> Config:
    """The last layers, which read the keys and values of others, and how wide all layers' dense parts are."""
    n_layers, n_shared = len(slides), keys.count("attention.shared_kv_layers", 0)
    if n_shared >= n_layers:
        raise keys.refuse("attention.shared_kv_layers", f"must be fewer than all {n_layers} layers")
    n_own = n_layers - n_shared
    widths = keys.counts("feed_forward_length", n_layers)
    own, shared = set(widths[:n_own]), set(widths[n_own:])
    doubled = {2 * one for one in own}
    if len(own) > 1 or (shared and shared not in (own, doubled)):
        raise keys.refuse(
            "feed_forward_length",
            f"must be one number in the first {n_own} layers, and it or twice it behind",
        )
    full = [i for i in range(n_own) if not slides[i]]
    return {
        "num_kv_shared_layers": n_shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": bool(shared) and shared == doubled,
        "attention_k_eq_v": bool(full) and not any(f"blk.{i}.attn_v.weight" in keys.tensors for i in full),
    }


def layer_inputs(keys: Keys) -> Config:
    """The small input that each layer has of its own."""
    d_input = keys.count("embedding_length_per_layer_input")
    n_rows = keys.tensor(LAYER_INPUTS).shape[0] if d_input else None
    return {"hidden_size_per_layer_input": d_input, "vocab_size_per_layer_input": n_rows}


def experts_beside(keys: Keys) -> Config:
    """The experts beside each dense part: chosen by a softmax, their weights summing to 1."""
    n_experts = keys.count("expert_count", 0)
    if not n_experts:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": n_experts,
        "top_k_experts": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
    }


def rotations(keys: Keys) -> Config:
    """Of each kind of layer. Raises `UnsupportedModel` for those of a part of a head, and for stretched ones."""
    widths = {FULL: keys.d_head, SLIDING: sliding_width(keys)}
    for name, width in zip(
        ("rope.dimension_count", "rope.dimension_count_swa"), widths.values(), strict=True
    ):
        if keys.count(name, width) != width:
            raise keys.refuse(name, f"must be the width of a head, {width}")
    found = {kind: unscaled_rope(keys, kind, width, width) for kind, width in widths.items()}
    partial = {"rope_type": "proportional", "partial_rotary_factor": turning_share(keys)}
    return {**found, FULL: found[FULL] | partial}


def turning_share(keys: Keys) -> float:
    """How much of a full layer's head turns: frequencies that stand still are divided by a huge number."""
    stored, n = keys.tensor(ROPE_FACTORS), keys.d_head // 2
    divisors = read_factors(stored)
    n_turning = sum(one == 1.0 for one in divisors)
    rest = divisors[n_turning:]
    if len(divisors) != n or not n_turning or not all(one >= STANDS for one in rest):
        raise UnsupportedModel(
            f"{stored.where} must be {n} numbers, first ones, then {STANDS:g} for what does not turn"
        )
    return share(n_turning, n)
