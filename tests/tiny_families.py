"""Configs of tiny models, one per family, in which every part of the family matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    KimiLinearConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Step3p7Config,
)

FULL, SLIDING = "full_attention", "sliding_attention"
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
}
# The original context of 64 makes all three branches of llama3's scaling matter.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HYBRID = {
    "head_dim": 32,
    "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def step_config(**text: Any) -> Step3p7Config:
    """Of the text model's keys, within a wrapper: transformers has no model of the text alone."""
    return Step3p7Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)


TOWER: dict[str, Any] = {  # of Qwen's vision models
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": SHAPE["hidden_size"],
}
DEEP = {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}


def wrapped(
    make: Callable[..., PretrainedConfig], vision: dict[str, Any], **own: Any
) -> Callable[..., PretrainedConfig]:
    """What makes a config for several media of its text model's keys. own: keys that every text model has."""

    def config(**text: Any) -> PretrainedConfig:
        tied = text.get("tie_word_embeddings", False)
        return make(text_config={**own, **text}, vision_config=dict(vision), tie_word_embeddings=tied)

    return config


# Queries count more from the second 32 positions on.
GROWING: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
}
FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    "llama": (
        LlamaConfig,
        {"head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False},
    ),
    "mistral": (
        MistralConfig,
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2": (
        Qwen2Config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True},
    ),
    "qwen3": (
        Qwen3Config,
        {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "mistral3": (
        wrapped(Mistral3Config, VISION, model_type="mistral"),
        {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": (
        Ministral3Config,
        {"head_dim": 16, "rope_parameters": GROWING, "tie_word_embeddings": False},
    ),
    "mistral3 of ministral3": (
        wrapped(Mistral3Config, VISION, model_type="ministral3"),
        {"head_dim": 16, "rope_parameters": GROWING, "tie_word_embeddings": True},
    ),
    "qwen2_5_vl": (
        wrapped(Qwen2_5_VLConfig, {**TOWER, "fullatt_block_indexes": [1], "window_size": 16}),
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl": (
        wrapped(Qwen3VLConfig, DEEP),
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": (
        wrapped(Qwen3VLMoeConfig, DEEP),
        {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5]},
            "tie_word_embeddings": False,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 384,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": False,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_5": (Qwen3_5TextConfig, HYBRID),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, {**HYBRID, **EXPERTS}),
    "qwen3_next": (Qwen3NextConfig, {**HYBRID, **EXPERTS, "norm_topk_prob": True}),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": False,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek_v2": (
        DeepseekV2Config,
        {**LATENTS, "q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **LATENTS,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 40.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {**LATENTS, "routed_scaling_factor": 1.8}),
    "kimi_linear": (
        KimiLinearConfig,
        {
            **{
                key: value
                for key, value in LATENTS.items()
                if key not in ("n_routed_experts", "rope_parameters")
            },
            "q_lora_rank": None,
            "num_local_experts": 8,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
    ),
    "mimo_v2_flash": (
        MiMoV2FlashConfig,
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 17,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "dense", "sparse"],
            "tie_word_embeddings": False,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "attention_value_scale": 0.707,
        },
    ),
    "step3p7": (
        step_config,
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "num_sliding_attention_heads": 6,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
            "sliding_window": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 48,
            "moe_router_scaling_factor": 3.0,
            "swiglu_limits": [0.0, 0.5, None, 0, 0.8],  # often reached
            "swiglu_limits_shared": [0.0, 0.0, 1.2, 0.7, 1.0],
            "rope_parameters": {
                FULL: {**LLAMA3_ROPE, "factor": 2.0, "high_freq_factor": 32.0, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "intermediate_size": 64,
            "head_dim": 16,
            "sliding_window": 16,
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "swiglu_limit": 2.0,  # often reached
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
