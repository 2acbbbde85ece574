"""A GGUF file's metadata as the config.json and generation_config.json that transformers would write of its model.

What the format leaves out is what llama.cpp (github.com/ggml-org/llama.cpp, src/models) assumes of each architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from slipstream.engine.checkpoint.gguf.config_parts import (
    EMBEDDING,
    FULL,
    OUTPUT,
    RECURRENT,
    SLIDING,
    Config,
    experts,
    experts_scale,
    refuse_other_gating,
    rope,
    windows,
)
from slipstream.engine.checkpoint.gguf.gemma4_keys import gemma4, gemma4_assistant
from slipstream.engine.checkpoint.gguf.header import shown
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.checkpoint.gguf.mimo2_keys import mimo2
from slipstream.engine.checkpoint.gguf.step35_keys import step35
from slipstream.engine.errors import UnsupportedModel

GEMMA3_27B = 62  # layers
# Keys that change the function computed, with the values under which they do not. An architecture heeds those it reads.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), ()),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "final_logit_softcapping": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"), (0,)),
    "rope.dimension_count_swa": (),
    "rope.freq_base_swa": (),
    "rope.scale_linear": (0, 1),
    "embedding_length_per_layer_input": (0,),
    "kda.head_dim": (),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "attention.value_scale": (0, 1),
    # Of draft heads.
    "conv_kernel_size": (),
    "selector_rank": (),
    "use_parallel_residual": (False,),
}
# What a file calls a default of sampling -> generation_config.json.
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
    "tokenizer.ggml.suppress_tokens": "suppress_tokens",
}


def model_config(keys: Keys) -> Config:
    """config.json. Raises `UnsupportedModel` naming key and value, or `LoadError`."""
    if keys.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{keys.path}: general.architecture = {shown(keys.architecture)} is not supported;"
            f" known: {', '.join(sorted(ARCHITECTURES))}"
        )
    named, read, has_embedding = ARCHITECTURES[keys.architecture]
    if has_embedding:
        keys.tensor(EMBEDDING)
    own = {"architectures": [named], **read(keys)}
    for name, harmless in HARMLESS.items():
        if name not in keys.heeded and keys.has(name) and keys.metadata[keys.full(name)] not in harmless:
            raise keys.refuse(name, "not supported")
    return own | {name: one(keys) for name, one in COMMON.items() if name not in own}


def generation_config(metadata: Mapping[str, Any]) -> Config:
    """generation_config.json: the sampling that the model's makers recommend."""
    stated = {name: metadata.get(key) for key, name in SAMPLING.items()}
    return {name: value for name, value in stated.items() if value is not None}


def run_in(keys: Keys) -> str:
    """The dtype of activations: float32 where all is stored in it, else bfloat16, which most models were trained in."""
    return "float32" if {one.kind for one in keys.tensors.values()} <= {"F32", "I64"} else "bfloat16"


# What the configs of all architectures have, unless one reads it in its own way.
COMMON: Mapping[str, Callable[[Keys], Any]] = {
    "hidden_size": lambda keys: keys.count("embedding_length"),
    "intermediate_size": lambda keys: keys.count(
        "feed_forward_length", keys.count("expert_feed_forward_length", 0)
    ),
    "num_hidden_layers": lambda keys: keys.n_layers,
    "num_nextn_predict_layers": lambda keys: keys.count("nextn_predict_layers", 0),
    "num_attention_heads": lambda keys: keys.count("attention.head_count"),
    "num_key_value_heads": lambda keys: keys.n_kv_heads,
    "head_dim": lambda keys: keys.d_head,
    "vocab_size": lambda keys: keys.tensors[EMBEDDING].shape[0] if EMBEDDING in keys.tensors else None,
    "max_position_embeddings": lambda keys: keys.count("context_length"),
    "rms_norm_eps": lambda keys: keys.number("attention.layer_norm_rms_epsilon"),
    "rope_parameters": rope,
    "tie_word_embeddings": lambda keys: OUTPUT not in keys.tensors,
    "attention_bias": lambda keys: "blk.0.attn_q.bias" in keys.tensors,
    "dtype": run_in,
}


def plain(keys: Keys) -> Config:
    """Llama and Qwen: a dense part in every layer."""
    if keys.count("expert_count", 0):
        raise keys.refuse("expert_count", "experts are not supported in this architecture")
    return {}


def gemma3(keys: Keys) -> Config:
    # The largest was trained with queries scaled by another width, which the format does not say.
    is_largest = keys.n_layers == GEMMA3_27B
    width = keys.count("embedding_length") // max(keys.count("attention.head_count"), 1)
    base = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if is_largest else keys.d_head,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {FULL: rope(keys), SLIDING: base},
        **windows(keys, 6),
    }


def gpt_oss(keys: Keys) -> Config:
    if keys.count("expert_gating_func", 3) not in (0, 3):
        raise keys.refuse("expert_gating_func", "only 3, a softmax over the chosen experts, is supported")
    return {
        **experts(keys, "num_local_experts"),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "rope_parameters": {**rope(keys), "truncate": False},
        "attention_bias": True,
        **windows(keys, 2),
    }


def glm4_moe(keys: Keys) -> Config:
    refuse_other_gating(keys)
    return {
        **routed_experts(keys, n_shared=1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
    }


def routed_experts(keys: Keys, *, n_shared: int) -> Config:
    """Experts in groups beside shared ones. n_shared: of a file that does not say."""
    return {
        **experts(keys, "n_routed_experts"),
        "n_shared_experts": keys.count("expert_shared_count", n_shared),
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0),
        "routed_scaling_factor": experts_scale(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=False),
        "n_group": max(1, keys.count("expert_group_count", 1)),
        "topk_group": max(1, keys.count("expert_group_used_count", 1)),
    }


def deepseek2(keys: Keys) -> Config:
    """DeepSeek-V2-Lite, V3, Kimi-K2 and GLM-4.7-Flash: what scores experts says which of the first two it is like."""
    gating = keys.count("expert_gating_func", 0)
    if gating not in (0, 1, 2):
        raise keys.refuse("expert_gating_func", "only 1, a softmax, and 2, a sigmoid, are supported")
    # Old files do not say; only a sigmoid comes with a bias for the choice.
    by_sigmoid = gating == 2 or (gating == 0 and any(".exp_probs_b" in name for name in keys.tensors))
    rotation, stretched = rope(keys), keys.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    if rotation["rope_type"] == "yarn":
        # The format has one of two numbers, which are equal wherever they are known.
        rotation |= (
            {"mscale": stretched, "mscale_all_dim": stretched} if stretched else {"attention_factor": 1.0}
        )
    return {
        **routed_experts(keys, n_shared=0),
        **latents(keys),
        "architectures": ["DeepseekV3ForCausalLM" if by_sigmoid else "DeepseekV2ForCausalLM"],
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in keys.tensors,
        "rope_parameters": rotation,
    }


def latents(keys: Keys) -> Config:
    """Widths of latent attention."""
    d_rope, mla = keys.count("rope.dimension_count"), "attention.key_length_mla"
    return {
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "q_lora_rank": keys.count("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "qk_rope_head_dim": d_rope,
        "qk_nope_head_dim": keys.count(mla if keys.has(mla) else "attention.key_length") - d_rope,
        "v_head_dim": keys.count("attention.value_length_mla" if keys.has(mla) else "attention.value_length"),
        "num_key_value_heads": keys.count("attention.head_count"),
    }


def kimi_linear(keys: Keys) -> Config:
    """Layers without heads of keys and values are recurrent. No layer has a rotation."""
    refuse_other_gating(keys, default=None)
    given = experts(keys)
    return {
        **latents(keys),
        "layer_types": [
            FULL if n else RECURRENT for n in keys.counts("attention.head_count_kv", keys.n_layers)
        ],
        "linear_num_heads": keys.count("attention.head_count"),
        "linear_head_dim": keys.count("kda.head_dim"),
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "num_experts": given["num_experts"],
        "num_experts_per_token": given["num_experts_per_tok"],
        "moe_intermediate_size": given["moe_intermediate_size"],
        "moe_renormalize": given["norm_topk_prob"],
        "num_shared_experts": keys.count("expert_shared_count"),
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0),
        "routed_scaling_factor": experts_scale(keys),
        "num_expert_group": max(1, keys.count("expert_group_count", 1)),
        "topk_group": max(1, keys.count("expert_group_used_count", 1)),
        "rope_parameters": None,
    }


def gated_delta(keys: Keys) -> Config:
    """Qwen3-Next and Qwen3.5: most layers have a recurrent state."""
    n_layers = keys.n_layers
    listed, every = (
        keys.flags("attention.recurrent_layers", n_layers),
        keys.count("full_attention_interval", 4),
    )
    recurrent = [bool((i + 1) % every) for i in range(n_layers)] if listed is None else listed
    n_value_heads = keys.count("ssm.time_step_rank")
    return {
        "layer_types": [RECURRENT if one else FULL for one in recurrent],
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": keys.count("ssm.inner_size") // max(n_value_heads, 1),
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": n_value_heads,
        "attn_output_gate": True,
        "num_nextn_predict_layers": None,
        "mtp_num_hidden_layers": keys.count("nextn_predict_layers", 0),
    }


def gated_delta_experts(keys: Keys) -> Config:
    return {
        **gated_delta(keys),
        **experts(keys),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
    }


def eagle3(keys: Keys) -> Config:
    return {
        "eagle_aux_hidden_state_layer_ids": keys.metadata.get(keys.full("target_layers")),
        "norm_before_residual": keys.flag("norm_before_residual", default=False),
        "norm_before_fc": keys.flag("norm_before_fc", default=False),
    }


def dflash(keys: Keys) -> Config:
    """Also DSpark, which adds two heads to it."""
    return {
        "aux_hidden_state_layer_ids": keys.metadata.get(keys.full("target_layers")),
        "block_size": keys.count("block_size"),
        "causal": keys.flag("attention.causal", default=False),
        "mask_token_id": keys.metadata.get("tokenizer.ggml.mask_token_id"),
        "sample_from_anchor": keys.flag("sample_from_anchor", default=False),
    }


class Architecture(NamedTuple):
    """How a GGUF architecture reads as a config."""

    name: str  # transformers'
    read: Callable[[Keys], Config]  # what the config has beyond `COMMON`, or in its place
    has_embedding: bool = True  # draft heads may use their target's


ARCHITECTURES: Mapping[str, Architecture] = {
    "dflash": Architecture("DFlashDraftModel", dflash, has_embedding=False),
    "eagle3": Architecture("LlamaForCausalLMEagle3", eagle3, has_embedding=False),
    "deepseek2": Architecture("DeepseekV3ForCausalLM", deepseek2),
    "gemma3": Architecture("Gemma3ForCausalLM", gemma3),
    "gemma4": Architecture("Gemma4ForCausalLM", gemma4),
    "gemma4-assistant": Architecture("Gemma4AssistantForCausalLM", gemma4_assistant),
    "glm4moe": Architecture("Glm4MoeForCausalLM", glm4_moe),
    "gpt-oss": Architecture("GptOssForCausalLM", gpt_oss),
    "kimi-linear": Architecture("KimiLinearForCausalLM", kimi_linear),
    "llama": Architecture("LlamaForCausalLM", plain),
    "mimo2": Architecture("MiMoV2FlashForCausalLM", mimo2),
    "qwen2": Architecture("Qwen2ForCausalLM", plain),
    "qwen3": Architecture("Qwen3ForCausalLM", plain),
    "qwen35": Architecture("Qwen3_5ForCausalLM", gated_delta),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", gated_delta_experts),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", experts),
    "qwen3next": Architecture("Qwen3NextForCausalLM", gated_delta_experts),
    "step35": Architecture("Step3p5ForCausalLM", step35),
}
