"""GGUF files written from checkpoint folders by the `gguf` package, with what converters write into them.

gguf_of(folder).as_type("Q8_0").write(path)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.block_data import block_bytes
from tests.gguf_tensors import Config, full_heads, translated
from tests.gguf_windows import mimo2_keys, step35_keys

NORMAL, CONTROL = 1, 3  # types of tokens
ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dflash",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4AssistantForCausalLM": "gemma4-assistant",
    "Gemma4ForCausalLM": "gemma4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "GptOssForCausalLM": "gpt-oss",
    "KimiLinearForCausalLM": "kimi-linear",
    "LlamaForCausalLM": "llama",
    "LlamaForCausalLMEagle3": "eagle3",
    "MiMoV2FlashForCausalLM": "mimo2",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3DSparkModel": "dflash",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Step3p5ForCausalLM": "step35",
}
# Matrices that converters leave in float32 whatever the type of the file.
KEPT_WIDE = ("ffn_gate_inp.", "ffn_gate_inp_shexp.", "ssm_conv1d.", "ssm_conv1d_")


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor in a type of the `gguf` package."""

    kind: str
    data: np.ndarray[Any, Any]  # [..., bytes of a row] uint8

    def values(self) -> Tensor:
        """What the bytes mean, float32, of the tensor's own shape."""
        return torch.from_numpy(
            gguf.quants.dequantize(self.data, gguf.GGMLQuantizationType[self.kind]).copy()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is written into a file."""

    architecture: str
    metadata: Mapping[str, Any]  # by their whole keys
    tensors: Mapping[str, Tensor | Blocks]  # by ggml's names

    def with_keys(self, changes: Mapping[str, Any]) -> Contents:
        """With other values; None takes a key away. A key that begins with a point is the architecture's."""
        whole = {
            f"{self.architecture}{key}" if key.startswith(".") else key: one for key, one in changes.items()
        }
        left = {key: one for key, one in {**self.metadata, **whole}.items() if one is not None}
        return replace(self, metadata=left)

    def with_tensors(self, changes: Mapping[str, Tensor | Blocks | None]) -> Contents:
        """With other tensors; None takes one away."""
        left = {name: one for name, one in {**self.tensors, **changes}.items() if one is not None}
        return replace(self, tensors=left)

    def as_type(self, kind: str, *, embeddings: bool = True) -> Contents:
        """Matrices in a type, as far as their rows are whole blocks. embeddings: those of tokens too.

        In types that the package cannot write they hold codes at random, and so other values than before.
        """
        quantise = _random_blocks if kind.endswith("_K") else quantised
        n_values = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        made: dict[str, Tensor | Blocks] = {}
        for name, tensor in self.tensors.items():
            fits = isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[-1] % n_values == 0
            fits = fits and name.endswith(".weight")
            left = any(one in name for one in KEPT_WIDE) or (not embeddings and name == "token_embd.weight")
            made[name] = quantise(tensor, kind) if fits and not left else tensor  # type: ignore[arg-type]
        return replace(self, tensors=made)

    def widened(self) -> Contents:
        """The same numbers, all in float32."""
        wide = {name: one.values() if isinstance(one, Blocks) else one for name, one in self.tensors.items()}
        return replace(self, tensors=wide)

    def write(self, path: Path, *, most_tensors: int = 0) -> Path:
        """Write the file; most_tensors: of one file of several. Returns the first's path."""
        writer = gguf.GGUFWriter(path, self.architecture, split_max_tensors=most_tensors)
        for key, value in self.metadata.items():
            _add_value(writer, key, value)
        for name, one in self.tensors.items():
            if isinstance(one, Blocks):
                writer.add_tensor(name, one.data, raw_dtype=gguf.GGMLQuantizationType[one.kind])
            else:
                writer.add_tensor(name, one.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path if path.exists() else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


def gguf_of(folder: Path, target: Path | None = None) -> Contents:
    """What a converter makes of a checkpoint folder, all in float32.

    target: of draft heads the folder of the model they draft for, whose tokenizer their files have.
    """
    config = json.loads((folder / "config.json").read_text())
    config |= config.get("text_config", {})
    if target is not None:
        config["target"] = json.loads((target / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    tensors = translated(architecture, config, load_file(folder / "model.safetensors"))
    config["n_nextn"] = n_nextn = len({name.split(".")[1] for name in tensors if ".nextn." in name})
    keys = {**_shape(config), **_rope(config), **READERS.get(architecture, _plain)(config)}
    n_blocks = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    keys["block_count"] = n_blocks
    if n_nextn:
        keys["nextn_predict_layers"] = n_nextn
    if "attention.recurrent_layers" in keys:
        keys["attention.recurrent_layers"] += [False] * n_nextn
    metadata = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    text = _text(folder if target is None else target)
    if (mask := _mask_id(config)) is not None:
        text["tokenizer.ggml.mask_token_id"] = mask
    wide = {name: one.float() if one.is_floating_point() else one for name, one in tensors.items()}
    return Contents(architecture=architecture, metadata=metadata | text, tensors=wide)


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: Mapping[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def quantised(tensor: Tensor, kind: str) -> Blocks:
    """A tensor in a type that the `gguf` package can write."""
    return Blocks(kind, gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType[kind]))


def _random_blocks(tensor: Tensor, kind: str) -> Blocks:
    rows = tensor.reshape(-1, tensor.shape[-1])
    data = block_bytes(kind, *rows.shape).numpy()  # [all rows, bytes of a row]
    return Blocks(kind, data.reshape(*tensor.shape[:-1], -1))


def _shape(config: Config) -> dict[str, Any]:
    n_heads = config["num_attention_heads"]
    return {
        "context_length": config.get("max_position_embeddings") or config["model_max_length"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": n_heads,
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
    }


def _rope(config: Config) -> dict[str, Any]:
    stated: Config = config.get("rope_parameters") or {}
    given: Config = stated.get("full_attention", stated)
    keys: dict[str, Any] = {
        "rope.freq_base": float(first(given.get("rope_theta") or config.get("rope_theta") or 10000.0))
    }
    kind = given.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": given["factor"]}
    if kind == "yarn":
        keys |= {
            "rope.scaling.original_context_length": given["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": given.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": given.get("beta_slow"),
        }
    return keys


def first(value: Any) -> Any:
    """Of a list the first."""
    return value[0] if isinstance(value, list) else value


def _rotated(config: Config) -> dict[str, Any]:
    """How much of a head is rotated."""
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    return {"rope.dimension_count": int(config["head_dim"] * share)}


def _plain(config: Config) -> dict[str, Any]:
    return {}


def _gemma3(config: Config) -> dict[str, Any]:
    sliding = config["rope_parameters"]["sliding_attention"]
    return {
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base_swa": sliding["rope_theta"],
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }


def _gemma4(config: Config) -> dict[str, Any]:
    n_layers, n_shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    wide, narrow = full_heads(config), config["num_key_value_heads"]
    n_full, d_full, d_sliding = wide.get("num_key_value_heads"), wide["head_dim"], config["head_dim"]
    keys = {
        **_gemma3(config),
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": n_shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), d_full),
        **dict.fromkeys(
            ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), d_sliding
        ),
        "expert_count": config["num_experts"],
        "expert_used_count": config["top_k_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }
    if config["use_double_wide_mlp"]:
        widths = [config["intermediate_size"] * (1 + (i >= n_layers - n_shared)) for i in range(n_layers)]
        keys["feed_forward_length"] = widths
    if n_full is not None:
        keys["attention.head_count_kv"] = [narrow if one else n_full for one in slides]
    return keys


def _gemma4_assistant(config: Config) -> dict[str, Any]:
    return {
        **_gemma4(config),
        "embedding_length_out": config["backbone_hidden_size"],
        "nextn_predict_layers": config["num_hidden_layers"],
    }


def _experts(config: Config) -> dict[str, Any]:
    n_experts = [
        config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config
    ]
    return {
        "expert_count": n_experts[0],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def _gpt_oss(config: Config) -> dict[str, Any]:
    return {
        **_experts(config),
        "expert_feed_forward_length": config["intermediate_size"],
        "attention.sliding_window": config["sliding_window"],
    }


def _glm4_moe(config: Config) -> dict[str, Any]:
    return {
        **_experts(config),
        **_rotated(config),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
    }


def _deepseek2(config: Config) -> dict[str, Any]:
    by_softmax = config["architectures"][0] == "DeepseekV2ForCausalLM"
    kinds = gguf.ExpertGatingFuncType
    d_latent, d_rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    dense = [kind == "dense" for kind in config.get("mlp_layer_types") or ()]
    stretch = config["rope_parameters"].get("mscale_all_dim")
    return {
        **_experts(config),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": d_latent,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": d_latent + d_rope,
        "attention.value_length": d_latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + d_rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": d_rope,
        "rope.scaling.yarn_log_multiplier": None if stretch is None else 0.1 * stretch,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config.get("first_k_dense_replace", sum(dense)),
        "expert_gating_func": int(kinds.SOFTMAX if by_softmax else kinds.SIGMOID),
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config.get("norm_topk_prob") or None,
    }


def _kimi_linear(config: Config) -> dict[str, Any]:
    d_latent, d_rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    kinds = config["mlp_layer_types"]
    n_dense = kinds.count("dense")
    assert kinds == ["dense"] * n_dense + ["sparse"] * (len(kinds) - n_dense)
    return {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config["layer_types"]],
        "attention.kv_lora_rank": d_latent,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": d_latent + d_rope,
        "attention.value_length": config["head_dim"],
        "attention.key_length_mla": config["qk_nope_head_dim"] + d_rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": d_rope,
        "rope.freq_base": None,
        "kda.head_dim": config["linear_head_dim"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "vocab_size": config["vocab_size"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_group_count": config.get("n_group"),  # released configs have another key, which is not read
        "expert_group_used_count": config["topk_group"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "expert_weights_scale": config["routed_scaling_factor"],
        "leading_dense_block_count": n_dense,
    }


def _gated_delta(config: Config) -> dict[str, Any]:
    n_value_heads = config["linear_num_value_heads"]
    return {
        **_rotated(config),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": n_value_heads,
        "ssm.inner_size": n_value_heads * config["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": 4,
    }


def _qwen3_5(config: Config) -> dict[str, Any]:
    return {**_gated_delta(config), "rope.dimension_sections": [11, 11, 10, 0]}


def _eagle3(config: Config) -> dict[str, Any]:
    n_layers = config["target"]["num_hidden_layers"]
    usual = [2, n_layers // 2, n_layers - 3]
    return {
        "target_layers": config.get("eagle_aux_hidden_state_layer_ids", usual),
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
    }


def _dflash(config: Config) -> dict[str, Any]:
    layers = _block_drafts(config).get("target_layer_ids")
    is_dspark = "DSpark" in config["architectures"][0]
    return {
        "block_size": config["block_size"],
        "target_layers": None if layers is None else [one + 1 for one in layers],
        "sample_from_anchor": config.get("sample_from_anchor", True) if is_dspark else None,
    }


def _block_drafts(config: Config) -> Config:
    """Where a config of block drafts says what they read."""
    given: Config = config.get("dflash_config", config)
    return given


def _mask_id(config: Config) -> int | None:
    return _block_drafts(config).get("mask_token_id")


READERS: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "deepseek2": _deepseek2,
    "dflash": _dflash,
    "eagle3": _eagle3,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4-assistant": _gemma4_assistant,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "kimi-linear": _kimi_linear,
    "mimo2": mimo2_keys,
    "llama": lambda config: {"rope.dimension_count": config["head_dim"], "vocab_size": config["vocab_size"]},
    "step35": step35_keys,
    "qwen3moe": _experts,
    "qwen35": _qwen3_5,
    "qwen35moe": lambda config: {**_qwen3_5(config), **_experts(config)},
    "qwen3next": lambda config: {**_gated_delta(config), **_experts(config)},
}


def _text(folder: Path) -> dict[str, Any]:
    """The tokenizer and the chat template of a folder, if it has any."""
    if not (folder / "tokenizer.json").exists():
        return {}
    given = json.loads((folder / "tokenizer.json").read_text())
    said = json.loads((folder / "tokenizer_config.json").read_text())
    ids: dict[str, int] = given["model"]["vocab"]
    control = {one["content"] for one in given["added_tokens"] if one["special"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    merges = [one if isinstance(one, str) else " ".join(one) for one in given["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",  # the cuts of the tokenizer of tests/checkpoints.py
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if one in control else NORMAL for one in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": ids[said["eos_token"]],
        "tokenizer.ggml.padding_token_id": ids[said["pad_token"]],
        "tokenizer.chat_template": said["chat_template"],
    }
