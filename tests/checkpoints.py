"""Tiny random checkpoints on disk, written by transformers itself so that the format is real.

Default initialisation makes attention nearly uniform and hides wrong positions and missed norms; matrices are
therefore scaled up and every norm weight and bias gets noise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.modeling_layers import MtpModel

from tests.tiny_families import FAMILIES, SHAPE

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


def trained_tokenizer(control: Sequence[str]) -> Tokenizer:
    """A byte-level BPE of 384 tokens, trained on the sentences, these control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(control),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with its chat template."""
    trained_tokenizer(CONTROL).save(str(folder / "tokenizer.json"))
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
    absent = {key for key, value in changes.items() if value is None}
    (copy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in absent}))
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
