"""A tiny assistant for a tiny Gemma 4, written by transformers itself so that the format is real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

EMBEDDING = ".embed_tokens.weight"
KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
LIKE_TARGET = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")


@contextmanager
def all_layers_shared() -> Iterator[None]:
    """transformers 5.23 refuses configs all of whose layers read others, which is what an assistant is."""
    if not hasattr(Gemma4TextConfig, "kv_sharing_modes"):  # older ones, such as 5.17, do not ask
        yield
        return
    original = Gemma4TextConfig.kv_sharing_modes.fget

    def modes(config: Gemma4TextConfig) -> list[str | None]:
        is_assistant = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if is_assistant else original(config)

    with patch.object(Gemma4TextConfig, "kv_sharing_modes", property(modes)):
        yield


def assistant_checkpoint(target: Path, folder: Path, **changes: Any) -> Path:
    """Write an assistant for a target; returns its folder. It guesses as if the target's layers changed little.

    changes: other fields of its config.
    """
    told = json.loads((target / "config.json").read_text())
    told = told.get("text_config", told)
    text = Gemma4TextConfig(
        **{key: told[key] for key in LIKE_TARGET},
        global_head_dim=32,
        vocab_size=told["vocab_size"],
        intermediate_size=48,
        num_hidden_layers=len(KINDS),
        num_kv_shared_layers=len(KINDS),
        layer_types=KINDS,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=told["max_position_embeddings"],
    )
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=told["hidden_size"], **changes)
    torch.manual_seed(3)
    with all_layers_shared():
        model = Gemma4AssistantForCausalLM(config).eval()
        with torch.no_grad():
            tensors = load_file(target / "model.safetensors")
            _make_revealing(model, next(tensors[name] for name in tensors if name.endswith(EMBEDDING)))
        model.save_pretrained(folder)
    return folder


def _make_revealing(model: Any, embedding: torch.Tensor) -> None:
    """Positions, keys and states matter, and guesses are right in part. embedding: the target's, [vocab, d_model]."""
    d = embedding.shape[1]
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.mul_(4.0)
        else:
            parameter.add_(0.2 * torch.randn_like(parameter))
        if name.endswith("q_norm.weight"):
            parameter.mul_(0.4)  # its scores are not scaled
    model.model.embed_tokens.weight.copy_(embedding)
    model.pre_projection.weight[:, :d].add_(torch.eye(d))
    for layer in model.model.layers:
        layer.layer_scalar.mul_(0.9)
    if model.masked_embedding is not None:
        n = len(model.masked_embedding.token_ordering)
        model.masked_embedding.token_ordering.copy_(torch.randperm(n))
