"""Tiny checkpoints as released models come: under the keys of their own configs, which transformers does not write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.checkpoints import with_config
from tests.tiny_families import FULL, SLIDING


def released_mimo(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy whose config says the same as the released files would; a change of None takes a key away."""
    given = json.loads((folder / "config.json").read_text())
    ropes = given["rope_parameters"]
    keys: dict[str, Any] = {
        **dict.fromkeys(("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "dtype")),
        "torch_dtype": "float32",
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in given["layer_types"]],
        "moe_layer_freq": [int(kind == "sparse") for kind in given["mlp_layer_types"]],
        "sliding_window": given["sliding_window"] - 1,
        "sliding_window_size": given["sliding_window"] - 1,
        "swa_num_attention_heads": given["num_attention_heads"],
        "swa_num_key_value_heads": 2 * given["num_key_value_heads"],
        "swa_head_dim": given["head_dim"],
        "swa_v_head_dim": given["v_head_dim"],
        "swa_rope_theta": ropes[SLIDING]["rope_theta"],
        "rope_theta": ropes[FULL]["rope_theta"],
        "partial_rotary_factor": ropes[FULL]["partial_rotary_factor"],
        "layernorm_epsilon": given["rms_norm_eps"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_chunk_size": 128,
    }
    if given["routed_scaling_factor"] == 1:
        keys["routed_scaling_factor"] = None
    copy = with_config(folder, target, **{**keys, **changes})
    written = json.loads((copy / "config.json").read_text())
    nulls = {"hybrid_block_size": None, "n_shared_experts": None, "routed_scaling_factor": None}
    (copy / "config.json").write_text(json.dumps({**nulls, **written}))
    return copy


def release_step(folder: Path, behind: Sequence[str] = (SLIDING, SLIDING, FULL)) -> None:
    """Make a checkpoint one of Step-3.5-Flash: no wrapper, other keys. behind: kinds of its layers of prediction."""
    tensors = load_file(folder / "model.safetensors")
    beside = ("vision_model.", "vit_large_projector.")
    own = {name: one for name, one in tensors.items() if not name.startswith(beside)}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(step_config(text, behind)))


def step_config(text: dict[str, Any], behind: Sequence[str]) -> dict[str, Any]:
    """The keys of the released Step-3.5-Flash, with lists that go on with three layers of multi-token prediction."""
    n = text["num_hidden_layers"]
    kinds = [*text["layer_types"][:n], *behind]
    sparse = [str(i) for i in range(n) if text["mlp_layer_types"][i] == "sparse"]
    full = text["rope_parameters"][FULL]
    kept = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
        *("head_dim", "max_position_embeddings", "moe_intermediate_size", "rms_norm_eps", "sliding_window"),
        *("share_expert_dim", "moe_router_scaling_factor"),
    )
    return {key: text[key] for key in kept} | {
        "architectures": ["Step3p5ForCausalLM"],
        "torch_dtype": "float32",
        "num_attention_groups": 2,
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "share_expert_dims": 48,
        "att_impl_type": "GQA",
        "norm_expert_weight": True,
        "moe_router_activation": "sigmoid",
        "moe_layers_enum": ",".join(sparse),
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "use_head_wise_attn_gate": True,
        "use_rope_layers": [],
        "yarn_only_types": [FULL],
        "sink": False,
        "num_nextn_predict_layers": 3,
        "layer_types": kinds,
        "attention_other_setting": {
            "attention_type": SLIDING,
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 16,
        },
        "rope_theta": [full["rope_theta"] if kind == FULL else 1e4 for kind in kinds],
        "partial_rotary_factors": [0.5 if kind == FULL else 1.0 for kind in kinds],
        "rope_scaling": {
            key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")
        },
        "swiglu_limits": [*(one or 0.0 for one in text["swiglu_limits"]), 0.0, 2.0, 0.0],
        "swiglu_limits_shared": [*text["swiglu_limits_shared"], 0.0, 3.0, 0.0],
    }
