"""Writing a network as a transformers checkpoint and reading it back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.network import Network, Shape
from demo.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS

MAX_POSITIONS = 8192
EOS_IDS = [SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def config(shape: Shape) -> dict[str, object]:
    """The config.json of a network."""
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


def export(network: Network, folder: Path, tokenizer_folder: Path) -> None:
    """Write config, generation config, bfloat16 weights and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = {
        "bos_token_id": None,
        "do_sample": False,
        "eos_token_id": EOS_IDS,
        "pad_token_id": EOS_IDS[1],
    }
    (folder / "config.json").write_text(json.dumps(config(network.shape), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {
        f"model.{name}": w.detach().to("cpu", torch.bfloat16).contiguous()
        for name, w in network.state_dict().items()
    }
    # A rename is atomic, so a reader never sees half a file.
    partial = folder / "model.safetensors.partial"
    save_file(weights, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder / name, folder / name)


def load(folder: Path) -> Network:
    """The network of a checkpoint in float32, with the values that bfloat16 left."""
    fields = json.loads((folder / "config.json").read_text())
    names = Shape.__dataclass_fields__
    network = Network(Shape(**{name: fields[name] for name in names}))
    weights = load_file(str(folder / "model.safetensors"))
    network.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
    return network


def parameter_count(network: Network) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(weight.numel() for weight in network.parameters())
