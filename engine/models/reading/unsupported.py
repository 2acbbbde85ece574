"""What to say of an architecture that is not supported: what it asks for that is missing, and what is nearest to it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from typing import Any

from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.models.reading.fields import Fields

# Config keys that ask for something that no supported family computes -> what that is. A value that is absent, false,
# 0 or empty asks for nothing; so does 1 for a factor.
ASKS_FOR: Mapping[str, str] = {
    "index_topk": "sparse attention with an indexer",
    "compress_ratios": "compressed attention",
    "attn_logit_softcapping": "soft-capped scores",
    "zero_expert_num": "experts that compute nothing",
    "mamba_d_state": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "state_size": "state-space layers",
    "ssm_state_size": "state-space layers",
    "conv_L_cache": "layers that are a short convolution",
    "rwkv_hidden_size": "RWKV layers",
    "layer_norm_eps": "layer norms in place of RMS norms",
    "layer_norm_epsilon": "layer norms in place of RMS norms",
    "alibi": "biases of positions (ALiBi)",
    "parallel_attn": "attention and feed-forward layers side by side",
    "use_parallel_residual": "attention and feed-forward layers side by side",
    "clip_qkv": "clipped queries, keys and values",
    "no_rope_layers": "layers without rotation",
    "is_encoder_decoder": "an encoder",
}
FACTORS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
)
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")
KINDS = ("full_attention", "sliding_attention", "linear_attention")  # of `layer_types`
# A key that says much about how a network is built -> the family to compare it with. The first that is there counts.
LIKE: Mapping[str, str] = {
    "kv_lora_rank": "DeepseekV3ForCausalLM",
    "linear_num_key_heads": "Qwen3NextForCausalLM",
    "n_routed_experts": "Glm4MoeForCausalLM",
    "num_experts": "Qwen3MoeForCausalLM",
    "num_local_experts": "Qwen3MoeForCausalLM",
    "layer_types": "Gemma3ForCausalLM",
}
PLAIN = "LlamaForCausalLM"
SIMILAR = 0.7  # of two names: one may be the other's next version


def unknown_architecture(name: str, fields: Fields, known: Collection[str]) -> UnsupportedModel:
    """The error for a text model `fields` of an architecture that is not among the known."""
    asked = asked_for(fields)
    if asked:
        needs = f"It asks for what no supported one has: {'; '.join(asked)}."
    else:
        needs = "Its config asks for nothing that is known to be missing: it may only lack a family file of its own."
    return UnsupportedModel(
        f"{fields.where}: architecture {name} is not supported. {needs}"
        f" Nearest of those that are: {nearest(name, fields, known)}; docs/models.md has all"
    )


def asked_for(fields: Fields) -> list[str]:
    """What the config wants that no family computes, each with its key and value."""
    values = fields.values
    found, named = list[str](), set[str]()
    for key, what in ASKS_FOR.items():
        if values.get(key) and what not in named:
            named.add(what)
            found.append(f"{what} ({key} = {_short(values[key])})")
    found += [
        f"a factor ({key} = {_short(values[key])})" for key in FACTORS if values.get(key) not in (None, 1)
    ]
    for key in ("hidden_act", "hidden_activation"):
        if values.get(key) not in (None, *ACTIVATIONS):
            found.append(f"another activation ({key} = {_short(values[key])})")
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        other = sorted({str(kind) for kind in kinds} - set(KINDS))
        found += [f"another kind of layer (layer_types: {', '.join(other)})"] if other else []
    return found


def nearest(name: str, fields: Fields, known: Collection[str]) -> str:
    """The known architecture whose name is nearly the same, else that of a network built alike."""
    stem = name.split("For")[0].lower()
    likeness = {one: SequenceMatcher(None, stem, one.split("For")[0].lower()).ratio() for one in known}
    closest = max(likeness, key=lambda one: (likeness[one], one))  # of versions that are as near the latest
    if likeness[closest] >= SIMILAR:
        return closest
    return next((family for key, family in LIKE.items() if fields.has(key)), PLAIN)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
