"""gpt-oss: sliding and full layers in turn, heads with a sink each, experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.moe import MoESpec, load_stack
from slipstream.engine.layers.norm import NormSpec
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.kernels.gated.activation import Activation
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.quantized import widened
from slipstream.kernels.moe.op import (
    ExpertBiases,
    ExpertMatrices,
    NarrowMatrices,
    PackedExperts,
    Routing,
    pack_experts,
)

UNDERSTOOD = ("layer_types", "num_local_experts")  # keys that other families must refuse
# What transformers assumes of keys that are left out: the first layer of each two slides.
DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window_pattern": 2,
}


def parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of this family is made of. Raises `UnsupportedModel` naming key and value."""
    if not config.fields.has("rope_parameters") and not config.fields.has("rope_scaling"):
        raise config.fields.refuse("rope_parameters", "must be given; transformers would assume YaRN")
    experts = read_experts(config)
    blocks = [BlockSpec(config.attention(window=window, sinks="sinks"), experts) for window in config.windows]
    return config.decoder(blocks, norm=NormSpec(config.norm_eps, wide=True))


def read_experts(config: ModelConfig) -> MoESpec:
    """The mixture of experts. Raises `UnsupportedModel` naming key and value."""
    fields = config.fields
    n_experts, top_k = fields.experts("num_local_experts", "num_experts_per_tok")
    limit, steepness = fields.positive("swiglu_limit", 7.0), fields.positive("swiglu_alpha", 1.702)
    return MoESpec(
        d_model=config.d_model,
        d_ffn=config.d_ffn,
        n_experts=n_experts,
        # A softmax over the chosen logits alone is the softmax over all logits, divided by its sum over the chosen.
        routing=Routing(top_k=top_k, scores="softmax", normed=True),
        router="router",
        router_bias=True,
        activation=Activation("clamped", limit, steepness),
        load_experts=load_experts,
    )


def load_experts(weights: TensorSource, name: str, spec: MoESpec) -> PackedExperts:
    """The experts whose tensors start with `name`: gates and ups in one tensor, where they alternate, or by expert."""
    n, d_model, d_ffn = spec.n_experts, spec.d_model, spec.d_ffn

    def matrices(part: str, d_in: int, d_out: int) -> ExpertMatrices:  # [n_experts, d_out, d_in]
        narrow = f"{name}.{part}"
        if f"{narrow}.weight" not in weights:
            return weights.take(narrow, [n, d_in, d_out]).transpose(1, 2).contiguous()
        stored = weights.take_linear([narrow], d_in, [n * d_out])  # MXFP4: all experts below each other
        if isinstance(stored, BlockWeight):
            return NarrowMatrices([replace(stored, data=one) for one in stored.data.chunk(n)])
        return widened(stored).view(n, d_out, d_in)

    gate_up: ExpertMatrices
    down: ExpertMatrices
    if f"{name}.0.gate_proj.weight" in weights:  # of GGUF files
        both = [[f"{name}.{i}.gate_proj", f"{name}.{i}.up_proj"] for i in range(n)]
        gate_up = load_stack(weights, both, (d_ffn, d_model))
        down = load_stack(weights, [[f"{name}.{i}.down_proj"] for i in range(n)], (d_model, d_ffn))
    else:
        gate_up = apart(matrices("gate_up_proj", d_model, 2 * d_ffn))  # [n_experts, 2 * d_ffn, d_model]
        down = matrices("down_proj", d_ffn, d_model)  # [n_experts, d_model, d_ffn]
    biases = ExpertBiases(
        gate_up=gates_first(weights.take(f"{name}.gate_up_proj_bias", [n, 2 * d_ffn])),
        down=weights.take(f"{name}.down_proj_bias", [n, d_model]),
    )
    return pack_experts(gate_up, down, biases, spec.activation)


def apart(gate_up: ExpertMatrices) -> ExpertMatrices:
    """[n_experts, 2 * d_ffn, d_model], outputs of gate and up in turn -> the same, all gates first."""
    if isinstance(gate_up, Tensor):
        return gates_first(gate_up)
    each = [one for one in gate_up.each if isinstance(one, BlockWeight)]
    return NarrowMatrices([replace(one, data=torch.cat((one.data[0::2], one.data[1::2]))) for one in each])


def gates_first(gate_up: Tensor) -> Tensor:
    """[n_experts, 2 * d_ffn, ...], a gate and an up in turn -> the same, all gates first."""
    return torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), 1)
