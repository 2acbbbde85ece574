"""Configs of public checkpoints, as far as they shape a network, and how many parameters the published files hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def config(architecture: str, shape: str, **more: Any) -> Config:
    """shape: width, feed-forward width, layers, heads, K/V heads, words, positions."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
    )
    sizes = dict(zip(names, map(int, shape.split()), strict=True))
    return {"architectures": [architecture], "torch_dtype": "bfloat16", **sizes, **more}


def wrapper(architecture: str, shape: str, *, tied: bool, **more: Any) -> Config:
    """The same text model within a model of several media."""
    inner = {key: value for key, value in config("", shape, **more).items() if key != "architectures"}
    return {
        "architectures": [architecture],
        "tie_word_embeddings": tied,
        "text_config": inner,
        "vision_config": {"depth": 27, "hidden_size": 1152},
    }


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GLM: Config = {
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
LATENTS: Config = {  # DeepSeek-V3's, and what followed it
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
DELTA: Config = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
QWEN35: Config = {
    **DELTA,
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
QWEN3_VL: Config = {
    "head_dim": 128,
    "attention_bias": False,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5e6,
}
GPT_OSS: Config = {
    "attention_bias": True,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
MIMO_FULL = [0, 5, 11, 17, 23, 29, 35, 41, 47]
STEP_KINDS = [
    "full_attention" if i % 4 == 0 else "sliding_attention" for i in range(48)
]  # the last 3: MTP layers
STEP: Config = {
    "att_impl_type": "GQA",
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "head_dim": 128,
        "num_attention_groups": 8,
        "num_attention_heads": 96,
    },
    "head_dim": 128,
    "layer_types": STEP_KINDS,
    "moe_intermediate_size": 1280,
    "moe_layers_enum": ",".join(str(i) for i in range(3, 45)),
    "moe_num_experts": 288,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 8,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "num_attention_groups": 8,
    "num_nextn_predict_layers": 3,
    "partial_rotary_factors": [0.5 if kind == "full_attention" else 1.0 for kind in STEP_KINDS],
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 131072,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "rope_theta": [5e6 if kind == "full_attention" else 1e4 for kind in STEP_KINDS],
    "share_expert_dim": 1280,
    "sliding_window": 512,
    "swiglu_limits": [7.0 if i in (43, 44) else 0.0 for i in range(48)],
    "swiglu_limits_shared": [16.0 if i in (43, 44) else 0.0 for i in range(48)],
    "tie_word_embeddings": False,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "use_rope_layers": [],
    "yarn_only_types": ["full_attention"],
}
GEMMA: Config = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}

CONFIGS: Mapping[str, Config] = {
    "Llama-3.1-8B": config(
        *("LlamaForCausalLM", "4096 14336 32 32 8 128256 131072"),
        rope_theta=5e5,
        rope_scaling=LLAMA3,
        tie_word_embeddings=False,
    ),
    "Llama-3.2-1B": config(
        *("LlamaForCausalLM", "2048 8192 16 32 8 128256 131072"),
        head_dim=64,
        rope_theta=5e5,
        rope_scaling={**LLAMA3, "factor": 32.0},
        tie_word_embeddings=True,
    ),
    "Mistral-7B-v0.3": config(
        "MistralForCausalLM",
        "4096 14336 32 32 8 32768 32768",
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-0.5B": config("Qwen2ForCausalLM", "896 4864 24 14 2 151936 32768", tie_word_embeddings=True),
    "Qwen2.5-7B": config(
        *("Qwen2ForCausalLM", "3584 18944 28 28 4 152064 32768"),
        use_sliding_window=False,
        sliding_window=131072,
        max_window_layers=28,
        tie_word_embeddings=False,
    ),
    "MiMo-7B": config(
        "MiMoForCausalLM",
        "4096 11008 36 32 8 151680 32768",
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
    ),
    "MiMo-V2-Flash": config(
        *("MiMoV2FlashForCausalLM", "4096 16384 48 64 4 152576 262144"),
        head_dim=192,
        v_head_dim=128,
        swa_num_attention_heads=64,
        swa_num_key_value_heads=8,
        swa_head_dim=192,
        swa_v_head_dim=128,
        hybrid_layer_pattern=[int(i not in MIMO_FULL) for i in range(48)],
        moe_layer_freq=[0, *[1] * 47],
        sliding_window=128,
        sliding_window_size=128,
        attention_chunk_size=128,
        rope_theta=5e6,
        swa_rope_theta=1e4,
        partial_rotary_factor=0.334,
        attention_bias=False,
        attention_value_scale=0.707,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        layernorm_epsilon=1e-5,
        n_routed_experts=256,
        n_shared_experts=None,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        routed_scaling_factor=None,
        tie_word_embeddings=False,
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(48)],
        },
    ),
    "Qwen3-0.6B": config(
        "Qwen3ForCausalLM", "1024 3072 28 16 8 151936 40960", head_dim=128, tie_word_embeddings=True
    ),
    "Qwen3-8B": config(
        "Qwen3ForCausalLM", "4096 12288 36 32 8 151936 40960", head_dim=128, tie_word_embeddings=False
    ),
    "Qwen3-30B-A3B": config(
        *("Qwen3MoeForCausalLM", "2048 6144 48 32 4 151936 40960"),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    ),
    "Qwen3-Next-80B-A3B": config(
        *("Qwen3NextForCausalLM", "2048 5120 48 16 2 151936 262144"),
        **DELTA,
        partial_rotary_factor=0.25,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
    ),
    "Qwen3.5-0.8B": wrapper(
        *("Qwen3_5ForConditionalGeneration", "1024 3584 24 8 2 248320 262144"),
        tied=True,
        **QWEN35,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
    ),
    "Qwen3.5-27B": wrapper(
        *("Qwen3_5ForConditionalGeneration", "5120 17408 64 24 4 248320 262144"),
        tied=False,
        **QWEN35,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
    ),
    "Qwen3.5-35B-A3B": wrapper(
        *("Qwen3_5MoeForConditionalGeneration", "2048 512 40 16 2 248320 262144"),
        tied=False,
        **QWEN35,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Qwen2.5-VL-7B": {
        **config(
            *("Qwen2_5_VLForConditionalGeneration", "3584 18944 28 28 4 152064 128000"),
            rope_theta=1e6,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
            rms_norm_eps=1e-6,
            use_sliding_window=False,
            sliding_window=32768,
            max_window_layers=28,
            tie_word_embeddings=False,
        ),
        "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
    },
    "Qwen3-VL-8B": wrapper(
        *("Qwen3VLForConditionalGeneration", "4096 12288 36 32 8 151936 262144"), tied=False, **QWEN3_VL
    ),
    "Qwen3-VL-30B-A3B": wrapper(
        *("Qwen3VLMoeForConditionalGeneration", "2048 6144 48 32 4 151936 262144"),
        tied=False,
        **QWEN3_VL,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "Mistral-Small-3.2-24B": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {
            **config("", "5120 32768 40 32 8 131072 131072"),
            "architectures": None,
            "model_type": "mistral",
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e9,
            "sliding_window": None,
        },
        "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24, "patch_size": 14},
        "torch_dtype": "bfloat16",
    },
    "gpt-oss-20b": config(
        "GptOssForCausalLM", "2880 2880 24 64 8 201088 131072", num_local_experts=32, **GPT_OSS
    ),
    "gpt-oss-120b": config(
        "GptOssForCausalLM", "2880 2880 36 64 8 201088 131072", num_local_experts=128, **GPT_OSS
    ),
    "GLM-4.5-Air": config(
        *("Glm4MoeForCausalLM", "4096 10944 46 96 8 151552 131072"),
        **GLM,
        n_routed_experts=128,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        use_qk_norm=False,
        routed_scaling_factor=1.0,
    ),
    "GLM-4.5": config(
        *("Glm4MoeForCausalLM", "5120 12288 92 96 8 151552 131072"),
        **GLM,
        n_routed_experts=160,
        moe_intermediate_size=1536,
        first_k_dense_replace=3,
        use_qk_norm=True,
        routed_scaling_factor=2.5,
    ),
    "DeepSeek-V2-Lite": config(
        *("DeepseekV2ForCausalLM", "2048 10944 27 16 16 102400 163840"),
        **{**LATENTS, "q_lora_rank": None, "n_shared_experts": 2},
        n_routed_experts=64,
        moe_intermediate_size=1408,
        num_experts_per_tok=6,
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
    ),
    "DeepSeek-V3": config(
        *("DeepseekV3ForCausalLM", "7168 18432 61 128 128 129280 163840"),
        **{**LATENTS, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
        n_routed_experts=256,
        moe_intermediate_size=2048,
        num_experts_per_tok=8,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
        rope_theta=10000,
        rope_scaling={
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "Kimi-K2": config(
        *("DeepseekV3ForCausalLM", "7168 18432 61 64 64 163840 131072"),
        **LATENTS,
        n_routed_experts=384,
        moe_intermediate_size=2048,
        num_experts_per_tok=8,
        routed_scaling_factor=2.827,
    ),
    "Kimi-Linear-48B-A3B": config(
        *("KimiLinearForCausalLM", "2304 9216 27 32 32 163840 1048576"),
        **{key: LATENTS[key] for key in LATENTS if key not in ("n_group", "n_shared_experts")}
        | {"q_lora_rank": None},
        num_experts=256,
        num_experts_per_token=8,
        num_expert_group=1,
        num_shared_experts=1,
        moe_intermediate_size=1024,
        moe_renormalize=True,
        moe_router_activation_func="sigmoid",
        mla_use_nope=True,
        routed_scaling_factor=2.446,
        head_dim=72,
        rms_norm_eps=1e-5,
        linear_attn_config={
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
            "full_attn_layers": KIMI_FULL,
            "kda_layers": [i for i in range(1, 28) if i not in KIMI_FULL],
        },
    ),
    "GLM-4.7-Flash": config(
        *("Glm4MoeLiteForCausalLM", "2048 10240 47 20 20 154880 202752"),
        **{**LATENTS, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
        n_routed_experts=64,
        moe_intermediate_size=1536,
        num_experts_per_tok=4,
        routed_scaling_factor=1.8,
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
    ),
    "Step-3.5-Flash": config("Step3p5ForCausalLM", "4096 11264 45 64 8 128896 262144", **STEP),
    "Gemma-4-31B": config(
        *("Gemma4ForCausalLM", "5376 21504 60 32 16 262144 262144"),
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=1024,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "Gemma-3-1B": config(
        *("Gemma3ForCausalLM", "1152 6912 26 4 1 262144 32768"),
        **GEMMA,
        sliding_window=512,
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
    ),
}
# Of all tensors in the published files, with MTP layers, of those without a vision tower.
PARAMETERS: Mapping[str, int] = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "MiMo-7B": 7_833_409_536,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-Next-80B-A3B": 81_324_862_720,
    "GLM-4.5-Air": 110_468_824_832,
    "GLM-4.5": 358_337_791_296,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 684_489_845_504,  # without scales
    "Kimi-K2": 1_026_408_232_448,
    "Kimi-Linear-48B-A3B": 49_122_681_728,
    "GLM-4.7-Flash": 31_221_488_576,
    "Gemma-3-1B": 999_885_952,
}
# Those among them that repeat embedding and head beside an MTP layer, and are shared here.
COPIES: Mapping[str, int] = {
    "GLM-4.5-Air": 2 * 151_552 * 4096,
    "GLM-4.5": 2 * 151_552 * 5120,
    "GLM-4.7-Flash": 2 * 154_880 * 2048,
    "DeepSeek-V3": 2 * 129_280 * 7168,
}
# Layers that the files hold without a word of it in the config.
SILENT_MTP: Mapping[str, int] = {"Qwen3-Next-80B-A3B": 1}
