"""DeepSeek-V2-Lite, V3, R1 and V3.1, Kimi-K2, GLM-4.7-Flash: latent attention, then experts beside a shared expert.

Sources: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.models.families.latents import read_latent_attention
from slipstream.engine.models.families.routed_experts import Scores, feed_forwards, read_experts
from slipstream.engine.models.reading.config import ModelConfig

UNDERSTOOD = ("n_routed_experts", "num_local_experts", "num_experts")  # keys that other families must refuse
# What transformers assumes of keys that are left out.
V2_DEFAULTS: Mapping[str, Any] = {"first_k_dense_replace": 0, "rope_interleave": True}
V3_DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
GLM_DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "routed_scaling_factor": 1.8,
}


def parts(config: ModelConfig, scores: Scores = "sigmoid") -> DecoderSpec:
    """What a decoder is made of whose routers score by sigmoid, with a bias for the choice, in groups.

    scores: by softmax they choose freely.
    """
    attention, experts = read_latent_attention(config, config.rope), read_experts(config, scores)
    blocks = [BlockSpec(attention, ffn) for ffn in feed_forwards(config, experts)]
    return config.decoder(blocks)


v2_parts = partial(parts, scores="softmax")
