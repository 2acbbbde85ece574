"""Architecture name -> family; loading a checkpoint folder as a network."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from slipstream.engine.checkpoint.layouts import Scheme
from slipstream.engine.checkpoint.outlined import OutlinedWeights
from slipstream.engine.checkpoint.pieces import META
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import LoadError
from slipstream.engine.layers.decoder import Decoder, DecoderSpec, load_decoder
from slipstream.engine.layers.embed import Head, load_head
from slipstream.engine.models.families import (
    deepseek_v3,
    gemma3,
    gemma4_text,
    glm4_moe,
    gpt_oss,
    kimi_linear,
    llama,
    mimo_v2_flash,
    mistral3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen_vl_text,
    step3p5,
)
from slipstream.engine.models.families.step_keys import with_common_keys
from slipstream.engine.models.heads.mtp import mtp_tensors
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.config import Family, ModelConfig, read_config
from slipstream.engine.ranks import ALONE, Ranks
from slipstream.kernels import select

log = logging.getLogger(__name__)


# Of layers with windows; where the config does not say so, Qwen has none, and if it has, none in the first layers.
WINDOWS = ("layer_types",)
NO_WINDOW = {"use_sliding_window": False, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(deepseek_v3.v2_parts, deepseek_v3.UNDERSTOOD, deepseek_v3.V2_DEFAULTS),
    "DeepseekV3ForCausalLM": Family(deepseek_v3.parts, deepseek_v3.UNDERSTOOD, deepseek_v3.V3_DEFAULTS),
    **{
        f"Gemma3For{use}": Family(gemma3.parts, gemma3.UNDERSTOOD, gemma3.DEFAULTS)
        for use in ("CausalLM", "ConditionalGeneration")
    },
    **{
        f"Gemma4For{use}": Family(gemma4_text.parts, gemma4_text.UNDERSTOOD, gemma4_text.DEFAULTS)
        for use in ("CausalLM", "ConditionalGeneration")
    },
    "Glm4MoeForCausalLM": Family(glm4_moe.parts, glm4_moe.UNDERSTOOD, glm4_moe.DEFAULTS),
    "Glm4MoeLiteForCausalLM": Family(deepseek_v3.parts, deepseek_v3.UNDERSTOOD, deepseek_v3.GLM_DEFAULTS),
    "GptOssForCausalLM": Family(gpt_oss.parts, gpt_oss.UNDERSTOOD, gpt_oss.DEFAULTS),
    "KimiLinearForCausalLM": Family(kimi_linear.parts, kimi_linear.UNDERSTOOD, kimi_linear.DEFAULTS),
    "LlamaForCausalLM": Family(llama.parts),
    "MiMoForCausalLM": Family(qwen2.parts),
    "MiMoV2FlashForCausalLM": Family(mimo_v2_flash.parts, mimo_v2_flash.UNDERSTOOD, mimo_v2_flash.DEFAULTS),
    "Ministral3ForCausalLM": Family(llama.parts, mistral3.UNDERSTOOD, dialect=mistral3.known_text),
    "Mistral3ForConditionalGeneration": Family(llama.parts, mistral3.UNDERSTOOD, dialect=mistral3.known_text),
    "MistralForCausalLM": Family(llama.parts, WINDOWS),
    "Qwen2_5_VLForConditionalGeneration": Family(
        qwen2.parts, WINDOWS, qwen_vl_text.DEFAULTS_2_5, qwen_vl_text.one_after_another
    ),
    "Qwen2ForCausalLM": Family(qwen2.parts, WINDOWS, NO_WINDOW),
    "Qwen3ForCausalLM": Family(qwen3.parts, WINDOWS, NO_WINDOW),
    "Qwen3NextForCausalLM": Family(qwen3_5.qwen3_next, qwen3_5.UNDERSTOOD, qwen3_5.DEFAULTS),
    **{
        f"Qwen3_5{kind}For{use}": Family(
            qwen3_5.qwen3_5, qwen3_5.UNDERSTOOD, qwen3_5.DEFAULTS, qwen3_5.in_turns
        )
        for kind in ("", "Moe")
        for use in ("CausalLM", "ConditionalGeneration")
    },
    "Qwen3MoeForCausalLM": Family(qwen3_moe.parts, qwen3_moe.UNDERSTOOD),
    "Qwen3VLForConditionalGeneration": Family(
        qwen3.parts, (), qwen_vl_text.DEFAULTS_3, qwen_vl_text.in_turns
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        qwen_vl_text.moe_parts, qwen3_moe.UNDERSTOOD, qwen_vl_text.MOE_DEFAULTS, qwen_vl_text.in_turns
    ),
    **{
        name: Family(step3p5.parts, step3p5.UNDERSTOOD, step3p5.DEFAULTS, with_common_keys)
        for name in ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")
    },
}


def read_model(path: Path | str) -> ModelConfig:
    """The config of a checkpoint folder, or of a config file alone, of a supported family.

    Raises `UnsupportedModel` or `LoadError`.
    """
    return read_config(path, FAMILIES)


def decoder_spec(config: ModelConfig, n_positions: int, vocab_size: int | None = None) -> DecoderSpec:
    """The parts list of a network. vocab_size: real token ids; None: all rows of the embedding."""
    parts = FAMILIES[config.architecture].parts(config)
    return replace(parts, n_positions=n_positions, vocab_size=vocab_size or config.vocab_rows)


def load_network(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    n_ctx: int,
    n_vocab: int | None = None,
    ranks: Ranks = ALONE,
) -> Network:
    """The network of a checkpoint folder, its weights cast to `dtype`.

    n_ctx: positions the rotary tables cover. n_vocab: real token ids; logits past them do not exist. None keeps all
    rows. ranks: whose part of it; a pass is then one of all ranks. The tensors of an MTP head in the folder are left to
    `load_mtp`. `kernels.select(device, dtype)` must have run, and for float32 too where a router computes in it.
    Raises `LoadError` and its subclasses, `SettingError` where the parts do not come out even.
    """
    config = read_model(path)
    if n_vocab is not None and n_vocab > config.vocab_rows:
        raise LoadError(f"{path}: the tokenizer has {n_vocab} tokens, the embedding {config.vocab_rows} rows")
    spec = decoder_spec(config, n_ctx, n_vocab)
    weights = Weights(path, dtype, device, config.quantization, ranks)
    n_params = None
    if ranks.n > 1:
        n_params = _check_whole(path, dtype, spec, config)
    elif config.quantization is not None:
        log_scheme(path, config.quantization)
    decoder = load_decoder(weights, spec.split(ranks.n))
    weights.leave(mtp_tensors(weights.names, config.n_layers))
    weights.finish()
    return Network(
        config=config,
        spec=spec,
        decoder=decoder,
        n_params=n_params or weights.n_params,
        weight_bytes=weights.n_bytes * ranks.n,
        dtype=dtype,
        device=device,
        n_ctx=n_ctx,
        ranks=ranks,
        read_head=partial(_whole_head, path, decoder, spec, config) if ranks.n > 1 else None,
    )


def _whole_head(path: Path | str, decoder: Decoder, spec: DecoderSpec, config: ModelConfig) -> Head:
    """The output matrix, where the decoder has one rank's part of it."""
    embedded = decoder.embedding
    weights = Weights(path, embedded.weight.dtype, embedded.weight.device, config.quantization)
    head = load_head(weights, "lm_head", embedded, spec.vocab_size, tied=spec.tied, cap=spec.logit_cap)
    weights.leave(weights.names)
    weights.finish()
    return head


def _check_whole(path: Path | str, dtype: torch.dtype, spec: DecoderSpec, config: ModelConfig) -> int:
    """The parameters of the network undivided.

    Raises `LoadError` unless the files' tensors are as large as the config says; parts could be cut out of any.
    """
    select_outlined(dtype)
    outlined = OutlinedWeights(path, dtype, META, config.quantization)
    load_decoder(outlined, spec)
    outlined.finish()
    return outlined.n_params


def select_outlined(dtype: torch.dtype) -> None:
    """Have operators for a network in that dtype whose tensors have no memory."""
    for one in dict.fromkeys((dtype, torch.float32)):  # some layers compute in float32
        select(META, one)


def log_scheme(path: Path | str, scheme: Scheme) -> None:
    """Say how a checkpoint's matrices are stored, and what its makers meant to be rounded and is not."""
    kinds = Counter(one.kind for one in scheme.by_name.values())
    types = "".join(f" {kind}={n}" for kind, n in kinds.most_common())  # of GGUF files
    log.info("quantised weights model=%s method=%s%s", path, scheme.method, types)
    if scheme.activations is not None:
        log.info(
            "quantised weights model=%s: activations (%s) are not rounded, only weights are read as stored",
            path,
            scheme.activations,
        )
