"""Writing a network as a transformers checkpoint and reading it back.

A plain network becomes a Qwen3, a hybrid one a Qwen3.5 of the text-only kind, whose file may also hold the
multi-token-prediction layer under `mtp.`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.hybrid_network import HybridNetwork, HybridShape
from demo.network import Network, Shape
from demo.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS

MAX_POSITIONS = 8192
EOS_IDS = [SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MTP_PREFIX = "mtp."


def config(shape: Shape) -> dict[str, object]:
    """The config.json of a network without a multi-token-prediction layer."""
    if isinstance(shape, HybridShape):
        return hybrid_config(shape)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": EOS_IDS[0],
        "pad_token_id": EOS_IDS[1],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def hybrid_config(shape: HybridShape) -> dict[str, object]:
    """The config.json of a hybrid network; transformers ignores the fields of the prediction layer."""
    half = shape.rotary_dim // 2
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "eos_token_id": EOS_IDS[0],
        "pad_token_id": EOS_IDS[1],
        "full_attention_interval": shape.full_attention_interval,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": shape.layer_types,
        "linear_conv_kernel_dim": shape.linear_conv_kernel_dim,
        "linear_key_head_dim": shape.linear_key_head_dim,
        "linear_num_key_heads": shape.linear_num_key_heads,
        "linear_num_value_heads": shape.linear_num_value_heads,
        "linear_value_head_dim": shape.linear_value_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": MAX_POSITIONS,
        "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.partial_rotary_factor,
            # Text has one position where images have three, so the sections say nothing here.
            "mrope_interleaved": True,
            "mrope_section": [(half + 2 - axis) // 3 for axis in range(3)],
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def export(
    network: Network, folder: Path, tokenizer_folder: Path, mtp: dict[str, Tensor] | None = None
) -> None:
    """Write config, generation config, bfloat16 weights and the tokenizer's files.

    mtp is the state of a hybrid network's multi-token-prediction layer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generation = {
        "bos_token_id": None,
        "do_sample": False,
        "eos_token_id": EOS_IDS,
        "pad_token_id": EOS_IDS[1],
    }
    fields = config(network.shape) | ({"mtp_num_hidden_layers": 1} if mtp else {})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    held = {f"model.{name}": weight for name, weight in network.state_dict().items()}
    held |= {f"{MTP_PREFIX}{name}": weight for name, weight in (mtp or {}).items()}
    weights = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in held.items()}
    # A rename is atomic, so a reader never sees half a file.
    partial = folder / "model.safetensors.partial"
    save_file(weights, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder / name, folder / name)


def load(folder: Path) -> Network:
    """The network of a checkpoint in float32, with the values that bfloat16 left; not its prediction layer."""
    shape = load_shape(folder)
    network = HybridNetwork(shape) if isinstance(shape, HybridShape) else Network(shape)
    weights = load_file(str(folder / "model.safetensors"))
    network.load_state_dict(
        {
            name.removeprefix("model."): weight.float()
            for name, weight in weights.items()
            if not name.startswith(MTP_PREFIX)
        }
    )
    return network


def load_shape(folder: Path) -> Shape:
    """The dimensions in a folder's config.json."""
    fields = json.loads((folder / "config.json").read_text())
    kind = HybridShape if fields["model_type"] == "qwen3_5_text" else Shape
    fields |= fields.get("rope_parameters", {})
    return kind(**{name: fields[name] for name in kind.__dataclass_fields__})


def parameter_count(network: Network) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(weight.numel() for weight in network.parameters())
