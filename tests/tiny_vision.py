"""Tiny random checkpoints of models that see images, whole folders: weights, tokenizer, template, image processor.

All is made by transformers, under the names of files that checkpoints on the hub have. Images take few tokens: 4 to 40,
Gemma 4's up to 70.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.checkpoints import trained_tokenizer
from tests.tiny_families import SHAPE
from tests.vision_families import TINY, VOCAB, TinyVision

# Family, and fields of the text's and the vision's config that differ from its own.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{family: (family, {}, {}) for family in TINY},
    "gemma3 wide window": ("gemma3", {"sliding_window": 40}, {}),
    "gemma4 bidirectional": (
        "gemma4",
        {"use_bidirectional_attention": "vision"},
        {"use_clipped_linears": False, "standardize": True},
    ),
    "gemma4 bidirectional, wide window": (
        "gemma4",
        {"use_bidirectional_attention": "vision", "sliding_window": 100},
        {},
    ),
    "gemma4 plain": (
        "gemma4",
        {
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
        },
        {"use_clipped_linears": False},
    ),
}


def tiny_vision(variant: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write one of the VARIANTS, random, with all its files; returns its folder."""
    family, text, vision = VARIANTS[variant]
    tiny = TINY[family]
    end = tiny.control.index(tiny.special["eos_token"])
    shape = {**SHAPE, "vocab_size": VOCAB, "eos_token_id": end, "bos_token_id": None}
    config = tiny.config({**shape, **tiny.text, **text}, {**tiny.vision, **vision}, tiny.outer)
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = tiny.model(config).eval()
    with torch.no_grad():
        spread(model)
    model.generation_config.eos_token_id = end
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, tiny)
    write_processor(folder, tiny)
    return folder


def spread(model: nn.Module) -> None:
    """Scale matrices up and put noise on norms and biases, so that each of them matters."""
    for name, parameter in model.named_parameters():
        if name.endswith(("position_embedding_table", "position_embedding.weight", "pos_embed.weight")):
            parameter.copy_(0.5 * torch.randn_like(parameter))
        elif name.endswith("mm_input_projection_weight"):  # of Gemma 3, initially zero
            parameter.copy_(0.2 * torch.randn_like(parameter))
        elif parameter.dim() > 1 and not name.endswith(("bias", "A_log")):
            parameter.mul_(4.0)
        else:
            parameter.add_(0.2 * torch.randn_like(parameter))
        if parameter.dim() == 3 and "conv1d" in name:  # kernels of short convolutions are small already
            parameter.add_(0.3 * torch.randn_like(parameter))
        if "q_norm.weight" in name and "Gemma4" in type(model).__name__:
            parameter.mul_(0.4)  # its scores are not scaled
    for name, buffer in model.named_buffers():
        spread_buffer(name.rpartition(".")[2], buffer)


def spread_buffer(name: str, buffer: Tensor) -> None:
    """The same for what is stored without being learned."""
    if name == "layer_scalar":
        buffer.mul_(0.9)
    elif name in ("input_max", "output_max", "input_min", "output_min"):
        buffer.fill_(1.5 if name.endswith("max") else -1.5)  # often reached
    elif name == "std_bias":
        buffer.copy_(0.5 * torch.randn_like(buffer))
    elif name == "std_scale":
        buffer.copy_(0.3 + 0.1 * torch.rand_like(buffer))


def write_tokenizer(folder: Path, tiny: TinyVision) -> None:
    """A byte-level BPE of 384 tokens, the family's control tokens first, with its template."""
    trained_tokenizer(tiny.control).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": tiny.template,
        **tiny.special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_processor(folder: Path, tiny: TinyVision) -> None:
    """preprocessor_config.json as checkpoints on the hub have it, or the one file of newer ones."""
    processor = tiny.processor()
    said = {key: value for key, value in processor.to_dict().items() if value is not None}
    said["image_processor_type"] = type(processor).__name__.removesuffix("Pil")
    rest = dict(tiny.processing)
    if tiny.file == "processor_config.json":
        rest["image_processor"] = said
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(said))
    if rest:
        (folder / "processor_config.json").write_text(json.dumps(rest))
