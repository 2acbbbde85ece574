"""What the rules of several architectures have in common: names of layers and tensors, and changed shapes."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.engine.checkpoint.gguf.config_parts import EMBEDDING, OUTPUT, ROPE_FACTORS
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.checkpoint.gguf.matrices import less_one, numbers
from slipstream.engine.checkpoint.gguf.names import Rule, Rules


def renamed(names: Mapping[str, str]) -> Rules:
    """Tensors that are the same under another name."""
    return {stored: (Rule(name),) for stored, name in names.items()}


def one_plus(names: Mapping[str, str]) -> Rules:
    """Norms that transformers stores as what is added to 1."""
    return {stored: (Rule(name, less_one),) for stored, name in names.items()}


def half_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] // 2, *shape[1:])


def unsqueezed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], 1, shape[-1])


one_row = numbers(lambda stored: stored.view(1, -1))
unsqueezed = numbers(lambda stored: stored.unsqueeze(-2))

# The factors of rotations are read with the config.
ENDS = {EMBEDDING: (Rule("model.embed_tokens.weight"),), OUTPUT: (Rule("lm_head.weight"),), ROPE_FACTORS: ()}
FINAL_NORM = {"output_norm.weight": "model.norm.weight"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **HEAD_NORMS,
}
SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **HEAD_NORMS,
}
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
# Of Gemma 4, beside the dense part.
EXPERTS_BESIDE = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}


def shared_expert(name: str) -> dict[str, str]:
    """The expert that every row sees."""
    return {
        "ffn_gate_shexp": f"{name}.gate_proj",
        "ffn_up_shexp": f"{name}.up_proj",
        "ffn_down_shexp": f"{name}.down_proj",
    }


def plain(keys: Keys) -> Rules:
    return renamed({**NORMS, **MATRICES, **EXPERTS})
