"""A model of one layer as the contents of a GGUF file, and how a file of it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.errors import LoadError
from slipstream.engine.models.registry import load_network
from tests.gguf_files import Contents

CPU = torch.device("cpu")
D_MODEL, D_FFN, VOCAB = 64, 32, 16
SHAPE = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": D_MODEL,
    "feed_forward_length": D_FFN,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.freq_base": 10000.0,
}
MATRICES = {
    "attn_q": (64, D_MODEL),
    "attn_k": (32, D_MODEL),
    "attn_v": (32, D_MODEL),
    "attn_output": (D_MODEL, 64),
    "ffn_gate": (D_FFN, D_MODEL),
    "ffn_up": (D_FFN, D_MODEL),
    "ffn_down": (D_MODEL, D_FFN),
}


def tiny(
    architecture: str = "llama", more: Mapping[str, Any] | None = None, **tensors: Tensor | None
) -> Contents:
    """A model of one layer, all ones. more: other keys, as in `Contents.with_keys`; tensors: of the layer."""
    vectors = {name: torch.ones(D_MODEL) for name in ("attn_norm", "ffn_norm")}
    layer = {**vectors, **{name: torch.full(shape, 0.01) for name, shape in MATRICES.items()}}
    ends = {"token_embd.weight": torch.ones(VOCAB, D_MODEL), "output_norm.weight": torch.ones(D_MODEL)}
    return (
        Contents(
            architecture=architecture,
            metadata={f"{architecture}.{key}": value for key, value in SHAPE.items()},
            tensors={**ends, **{f"blk.0.{name}.weight": one for name, one in layer.items()}},
        )
        .with_keys(more or {})
        .with_tensors({f"blk.0.{name}.weight": one for name, one in tensors.items()})
    )


def refusal(path: Path, error: type[LoadError]) -> str:
    """The message of a refusal to load a file, on one line, with its name."""
    with pytest.raises(LoadError) as caught:
        load_network(path, torch.float32, CPU, 64)
    assert type(caught.value) is error, caught.value
    message = str(caught.value)
    assert message.startswith(f"{path.parent}/")
    assert message.isprintable()
    assert len(message) < 900
    return message.removeprefix(f"{path.parent}/")
