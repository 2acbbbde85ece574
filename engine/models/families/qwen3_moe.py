"""Qwen3-MoE: the Qwen3 block, whose feed-forward layer is a mixture of experts in all layers or in every n-th."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.moe import MoESpec, load_experts
from slipstream.engine.layers.norm import NormSpec
from slipstream.engine.models.families.softmax_experts import read_experts, sparse_layers
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.kernels.moe.op import PackedExperts

UNDERSTOOD = ("num_experts", "num_local_experts")  # keys that other families must refuse


def parts(
    config: ModelConfig,
    n_positions: int,
    vocab_size: int,
    *,
    load: Callable[[TensorSource, str, MoESpec], PackedExperts] = load_experts,
) -> DecoderSpec:
    """What a decoder of this family is made of. load: what reads the experts of a layer."""
    attention = config.attention(
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norm=NormSpec(config.norm_eps),
    )
    dense = MLPSpec(config.d_model, config.d_ffn)
    sparse = replace(read_experts(config, normed=False), load_experts=load)
    blocks = [BlockSpec(attention, sparse if here else dense) for here in sparse_layers(config)]
    return config.decoder(blocks, n_positions, vocab_size)
