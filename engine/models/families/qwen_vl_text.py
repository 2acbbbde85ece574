"""The text models of Qwen2.5-VL and Qwen3-VL, dense and with experts: Qwen2 and Qwen3 with sections of frequencies.

What DeepStack adds behind the first blocks of Qwen3-VL comes with an image; text has none of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.moe import MoESpec, load_experts
from slipstream.engine.models.families.sections import sectioned
from slipstream.engine.models.families.softmax_experts import feed_forwards, read_experts
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.engine.ranks import Joint
from slipstream.kernels.moe.op import PackedExperts, pack_experts

# What transformers assumes of keys that are left out.
DEFAULTS_2_5: dict[str, Any] = {
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "use_sliding_window": False,
    "max_window_layers": 80,
}
DEFAULTS_3: dict[str, Any] = {"rope_theta": 5e5, "head_dim": 128}
MOE_DEFAULTS: dict[str, Any] = {"rope_theta": 5e5}

one_after_another = sectioned([16, 24, 24], interleaved=False)  # Qwen2.5-VL
in_turns = sectioned([24, 20, 20], interleaved=True)  # Qwen3-VL


def moe_parts(config: ModelConfig) -> DecoderSpec:
    """What a decoder of Qwen3-VL with experts is made of."""
    turned = replace(read_experts(config, normed=True, always=True), load_experts=load_turned)
    attention = config.attention(head_norm=config.norm)
    blocks = [BlockSpec(attention, ffn) for ffn in feed_forwards(config, turned)]
    return config.decoder(blocks)


def load_turned(weights: TensorSource, name: str, spec: MoESpec) -> PackedExperts:
    """The experts whose tensors start with `name`: in released files inputs come before outputs, in others after."""
    both, down = f"{name}.gate_up_proj", f"{name}.down_proj"
    n, d_model, d_ffn = spec.n_experts, spec.d_model, spec.d_ffn
    if both not in weights:
        return load_experts(weights, name, spec)
    stored = weights.shape(both), weights.shape(down)
    plain = (n, 2 * d_ffn * weights.ranks.n, d_model), (n, d_model, d_ffn * weights.ranks.n)
    if stored == (None, None) or stored == plain:
        return load_experts(weights, name, spec)
    gate_up = weights.take(both, [n, d_model, 2 * d_ffn], joint=Joint(2, (d_ffn, d_ffn)))
    down_proj = weights.take(down, [n, d_ffn, d_model])
    return pack_experts(
        gate_up.transpose(1, 2).contiguous(),
        down_proj.transpose(1, 2).contiguous(),
        activation=spec.activation,
    )
