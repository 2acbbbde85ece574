"""Metadata of GGUF files of models whose layers with a window have heads of another kind, as their converters write it.

Of the released configs; transformers' own lack keys that the converters read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf

from tests.tiny_families import SLIDING

Config = Mapping[str, Any]
SIGMOID = int(gguf.ExpertGatingFuncType.SIGMOID)


def mimo2_keys(config: Config) -> dict[str, Any]:
    """MiMo-V2-Flash. Layers of prediction count as sliding ones."""
    assert config["scoring_func"] == "sigmoid"
    slides = [*config["hybrid_layer_pattern"], *[1] * config["n_nextn"]]
    n_kv_heads = config["num_key_value_heads"], config["swa_num_key_value_heads"]
    return {
        "attention.head_count_kv": [n_kv_heads[one] for one in slides],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.value_length": config["v_head_dim"],
        "attention.layer_norm_rms_epsilon": config["layernorm_epsilon"],
        "attention.value_scale": config.get("attention_value_scale"),
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.freq_base_swa": config["swa_rope_theta"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_gating_func": SIGMOID,
    }


def step35_keys(config: Config) -> dict[str, Any]:
    """Step-3.5-Flash. Its lists go on with the layers of prediction, where they are written."""
    n_all = config["num_hidden_layers"] + config["n_nextn"]
    slides = [kind == SLIDING for kind in config["layer_types"][:n_all]]
    assert config["partial_rotary_factors"][:n_all] == [1.0 if one else 0.5 for one in slides]
    assert config["moe_router_activation"] == "sigmoid"
    other = config["attention_other_setting"]
    full, sliding = config["num_attention_heads"], other["num_attention_heads"]
    n_kv_heads = config["num_attention_groups"], other["num_attention_groups"]
    limits = {
        name: [*map(float, config[key]), *[0.0] * n_all][:n_all]
        for name, key in (("exp", "swiglu_limits"), ("shexp", "swiglu_limits_shared"))
        if config.get(key) is not None
    }
    sparse = [int(one) for one in config["moe_layers_enum"].split(",")]
    return {
        "attention.head_count": [sliding if one else full for one in slides],
        "attention.head_count_kv": [n_kv_heads[one] for one in slides],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "rope.freq_base_swa": config["rope_theta"][1],
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_top_k"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["share_expert_dim"],
        "expert_gating_func": SIGMOID,
        "expert_weights_scale": config["moe_router_scaling_factor"],
        "expert_weights_norm": config["norm_expert_weight"],
        "leading_dense_block_count": min(sparse),
        "moe_every_n_layers": config.get("moe_every_n_layer", 1),
        **{f"swiglu_clamp_{name}": one for name, one in limits.items()},
    }
