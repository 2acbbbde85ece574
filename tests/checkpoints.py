"""Tiny random checkpoints on disk, written by transformers itself so that the format is real.

Default initialisation makes attention nearly uniform and hides wrong positions and missed norms; matrices are
therefore scaled up and every norm weight and bias gets noise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    KimiLinearConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Step3p7Config,
)
from transformers.modeling_layers import MtpModel

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(left, right):\n    return left + right\n",
    "A slot holds one sequence; a span is its tokens in one pass.",
    "for number in range(10):\n    print(number, number * number)\n",
    "What is the answer? The answer is forty-two, said the user to the assistant of the system.",
    "Größe, 漢字 and 😀 are longer than one byte.",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
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
FULL, SLIDING = "full_attention", "sliding_attention"
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


def tiny_checkpoint(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    vocab: int = 384,
    dtype: torch.dtype = torch.float32,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random checkpoint of a family with tokenizer and chat template; returns its folder.

    vocab: rows of the embedding, at least the tokenizer's 384 tokens. changes: other config fields.
    """
    make, own = FAMILIES[family]
    config = make(**{**SHAPE, **own, "vocab_size": vocab, **(changes or {})})
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith(("bias", "A_log")):
                parameter.mul_(4.0)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if parameter.dim() == 3:  # the kernels of short convolutions, which are small already
                parameter.add_(0.3 * torch.randn_like(parameter))
            if family == "gemma4" and name.endswith("q_norm.weight"):
                parameter.mul_(0.4)  # its scores are not scaled
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.mul_(0.9)
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def auto_class(config: PretrainedConfig) -> Any:
    """What makes transformers' model of a config."""
    has_text_alone = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if has_text_alone else AutoModelForImageTextToText


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE of 384 tokens on the sentences and write it with its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(CONTROL),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "bos_token": None,
        "eos_token": CONTROL[2],
        "pad_token": CONTROL[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def noised_copy(path: Path, folder: Path, sigma: float, *, seed: int = 1) -> Path:
    """A copy whose matrices got relative noise `sigma`: a draft that agrees with the original in part."""
    shutil.copytree(path, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
            weights[name] = (weight.float() + sigma * noise).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


N_PROMPT = 100  # past the original context of 64 of the scaled rotary embeddings
Oracle = tuple[Path, Tensor, Tensor]  # folder, prompt [N_PROMPT] int64, its logits [N_PROMPT, vocab] float32


def theirs(folder: Path) -> Any:
    """The checkpoint in transformers, float32."""
    return (
        auto_class(AutoConfig.from_pretrained(folder))
        .from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        .eval()
    )


def edited(folder: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a checkpoint with its tensors changed in place by `edit`."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def with_config(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other config fields; None takes one away."""
    copy = edited(folder, target, lambda all: None)
    config = {**json.loads((copy / "config.json").read_text()), **changes}
    (copy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return copy


def deepseek_head(model: Any) -> tuple[MtpModel, dict[str, Tensor]]:
    """transformers' head of one layer, random, and its tensors as a checkpoint has them after those of four layers."""
    torch.manual_seed(0)
    head = MtpModel(model, 1).eval()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, one in [*head.layers.named_parameters(), *head.layers.named_buffers()]:
            if "inv_freq" in name:
                continue
            scale, mean = (0.2, float("norm" in name)) if one.dim() == 1 else (1.5 * one.shape[-1] ** -0.5, 0)
            one.copy_(mean + scale * torch.randn_like(one))
            rest = name.partition(".")[2].replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
            tensors[f"model.layers.4.{rest}"] = one.detach().clone()
    return head, tensors
