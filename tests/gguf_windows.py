"""Metadata of GGUF files of models whose layers with a window have heads of another kind, as their converters write it.

Of the released configs; transformers' own lack keys that the converters read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf

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
