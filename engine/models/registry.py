"""Architecture name -> family; loading a checkpoint folder as a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import LoadError, UnsupportedModel
from engine.layers.decoder import DecoderSpec, load_decoder
from engine.models import llama, qwen2, qwen3
from engine.models.config import ModelConfig, read_config
from engine.models.mtp import mtp_tensors
from engine.models.network import Network
from engine.weights import Weights

FAMILIES: dict[str, Callable[[ModelConfig, int, int], DecoderSpec]] = {
    "LlamaForCausalLM": llama.parts,
    "MiMoForCausalLM": qwen2.parts,
    "MistralForCausalLM": llama.parts,
    "Qwen2ForCausalLM": qwen2.parts,
    "Qwen3ForCausalLM": qwen3.parts,
}


def load_network(
    path: Path | str, dtype: torch.dtype, device: torch.device, n_ctx: int, n_vocab: int | None = None
) -> Network:
    """The network of a checkpoint folder, its weights cast to `dtype`.

    n_ctx: positions the rotary tables cover. n_vocab: real token ids; logits past them do not exist. None
    keeps all rows. The tensors of an MTP head in the folder are left to `load_mtp`. `kernels.select(device,
    dtype)` must have run. Raises `LoadError` and its subclasses.
    """
    config = read_config(path)
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise UnsupportedModel(
            f"{path}: architecture {config.architecture} is not supported; known: {', '.join(FAMILIES)}"
        )
    if n_vocab is not None and n_vocab > config.vocab_rows:
        raise LoadError(f"{path}: the tokenizer has {n_vocab} tokens, the embedding {config.vocab_rows} rows")
    weights = Weights(path, dtype, device)
    decoder = load_decoder(weights, family(config, n_ctx, n_vocab or config.vocab_rows))
    weights.leave(mtp_tensors(weights.names, config.n_layers))
    weights.finish()
    return Network(
        config=config, decoder=decoder, n_params=weights.n_params, dtype=dtype, device=device, n_ctx=n_ctx
    )
