"""What GGUF's converters call and change in each architecture: the names of layers, and what undoes the changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from slipstream.engine.checkpoint.gguf.config_parts import EMBEDDING, OUTPUT
from slipstream.engine.checkpoint.gguf.header import Stored
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.checkpoint.gguf.matrices import (
    Matrix,
    as_it_is,
    columns,
    grouped_heads,
    half_of_rows,
    log_of_negative,
    numbers,
    rotated_halves,
    rows,
    runs,
)
from slipstream.engine.checkpoint.gguf.names import Dialect, Recipe, Rule, Rules
from slipstream.engine.checkpoint.gguf.rule_parts import (
    ENDS,
    EXPERTS,
    EXPERTS_BESIDE,
    FINAL_NORM,
    MATRICES,
    NORMS,
    SANDWICH_NORMS,
    half_shape,
    one_plus,
    one_row,
    plain,
    renamed,
    shared_expert,
    unsqueezed,
    unsqueezed_shape,
)
from slipstream.engine.checkpoint.gguf.window_dialects import WINDOW_DIALECTS
from slipstream.engine.errors import LoadError
from slipstream.kernels.matmul.quantized import widened


def llama(keys: Keys) -> Rules:
    """Rotated pairs lie side by side. Raises `UnsupportedModel` where only a part of each head is rotated."""
    d_head = keys.d_head
    if keys.count("rope.dimension_count", d_head) != d_head or d_head % 2:
        raise keys.refuse("rope.dimension_count", f"must be the width of a head, {d_head}, and even")
    queries = rotated_halves(keys.count("attention.head_count"), d_head)
    stored_keys = rotated_halves(keys.n_kv_heads, d_head)
    return {
        **plain(keys),
        "attn_q": (Rule("self_attn.q_proj", rows(queries)),),
        "attn_k": (Rule("self_attn.k_proj", rows(stored_keys)),),
    }


def gemma3(keys: Keys) -> Rules:
    return {**renamed(MATRICES), **one_plus(SANDWICH_NORMS)}


def gemma4(keys: Keys) -> Rules:
    """Norms are stored as they are. Gates and ups of an expert lie one below the other, in other files apart."""
    names = {
        **MATRICES,
        **SANDWICH_NORMS,
        **EXPERTS_BESIDE,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale.weight": "layer_scalar",
    }
    both = (("gate_proj", half_of_rows(0)), ("up_proj", half_of_rows(1)))
    apart = tuple(Rule(f"experts.{{}}.{name}", undo, half_shape) for name, undo in both)
    return {**renamed(names), "ffn_gate_up_exps": apart}


def glm4_moe(keys: Keys) -> Rules:
    older = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}  # without an ending
    return {**plain(keys), **renamed({**shared_expert("mlp.shared_experts"), **older})}


def deepseek2(keys: Keys) -> Rules:
    """Keys and values of each head are apart, those of keys turned; see `joint_heads`. Older files have them joined."""
    names = {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
    }
    return {**glm4_moe(keys), **renamed(names)}


def kernel_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(shape[:-1]), 1, shape[-1])


def rate_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, 1, math.prod(shape), 1)


as_kernels = numbers(lambda one: one.view(kernel_shape(one.shape)))
as_rates = numbers(lambda one: one.view(rate_shape(one.shape)))


def rates_of_heads(one: Matrix) -> Matrix:
    """Rates of decay as transformers stores them."""
    return as_rates(log_of_negative(one))


def kimi_linear(keys: Keys) -> Rules:
    """Recurrent layers, and latent attention as in DeepSeek's. Kernels and rates of decay have more dimensions."""
    parts = {f"ssm_{one}": f"self_attn.{one}_proj" for one in ("f_a", "f_b", "g_a", "g_b")}
    return {
        **deepseek2(keys),
        **renamed({**parts, "ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm"}),
        **{
            f"ssm_conv1d_{one}": (Rule(f"self_attn.{one}_conv1d", as_kernels, kernel_shape),)
            for one in ("q", "k", "v")
        },
        "ssm_dt.bias": (Rule("self_attn.dt_bias"),),
        "ssm_a": (Rule("self_attn.A_log", rates_of_heads, rate_shape),),
    }


def joint_heads(layer: Mapping[str, Stored]) -> Iterator[tuple[str, Recipe]]:
    """Keys [n_heads, d_latent, d_plain] and values [n_heads, d_value, d_latent] -> one matrix, head by head."""
    of_keys, of_values = layer.get("attn_k_b.weight"), layer.get("attn_v_b.weight")
    if of_keys is None or of_values is None:
        return
    for one in (of_keys, of_values):
        if len(one.shape) != 3 or one.shape[0] != of_keys.shape[0]:
            raise LoadError(f"{one.where} has shape {list(one.shape)}, must be a matrix for each head")
    (n, d_latent, d_plain), (_, d_value, d_last) = of_keys.shape, of_values.shape
    if d_last != d_latent:
        raise LoadError(f"{of_values.where} has shape {list(of_values.shape)}, must end in {d_latent}")

    def make(keys: Matrix, values: Matrix) -> Tensor:
        turned = widened(keys).view(n, d_latent, d_plain).transpose(1, 2)
        return torch.cat((turned, widened(values).view(n, d_value, d_latent)), 1).flatten(0, 1)

    yield (
        "self_attn.kv_b_proj.weight",
        Recipe((of_keys, of_values), (n * (d_plain + d_value), d_latent), None, make),
    )


def gpt_oss(keys: Keys) -> Rules:
    """The experts' biases are merged; see `joint_expert_biases`."""
    names = {**NORMS, **MATRICES, "ffn_gate_inp": "mlp.router"}
    experts = {
        f"ffn_{one}_exps.weight": f"mlp.experts.{{}}.{one}_proj.weight" for one in ("gate", "up", "down")
    }
    return {**renamed({**names, **experts}), "attn_sinks.weight": (Rule("self_attn.sinks"),)}


def alike(*tensors: Stored, n_dimensions: int) -> tuple[int, ...]:
    """The shape that tensors have in common. Raises `LoadError` naming one that has another."""
    for one in tensors:
        if len(one.shape) != n_dimensions or one.shape != tensors[0].shape:
            raise LoadError(
                f"{one.where} has shape {list(one.shape)}, must have {n_dimensions} dimensions"
                f" as {tensors[0].name} {list(tensors[0].shape)}"
            )
    return tensors[0].shape


def alternating(gate: Matrix, up: Matrix) -> Tensor:
    """Rows of a gate and of an up in turn, along a new last dimension."""
    return torch.stack((widened(gate), widened(up)), -1)


def joint_biases(gate: Stored, up: Stored) -> Recipe:
    """The biases of gates and ups, [n, d_ffn] -> [n, 2 * d_ffn]."""
    n, d_ffn = alike(gate, up, n_dimensions=2)
    return Recipe((gate, up), (n, 2 * d_ffn), None, lambda *parts: alternating(*parts).flatten(1))


def joint_expert_biases(layer: Mapping[str, Stored]) -> Iterator[tuple[str, Recipe]]:
    """gpt-oss: the biases of gates and ups of all experts in one tensor, where they alternate."""
    gate, up, down = (layer.get(f"ffn_{one}_exps.bias") for one in ("gate", "up", "down"))
    if gate is not None and up is not None:
        yield "mlp.experts.gate_up_proj_bias", joint_biases(gate, up)
    if down is not None:
        yield "mlp.experts.down_proj_bias", Recipe((down,), down.shape)


def gated_delta(keys: Keys) -> Rules:
    """What both dialects of layers with a recurrent state have in common."""
    return {
        **renamed(
            {**MATRICES, **EXPERTS, **shared_expert("mlp.shared_expert"), "ssm_norm": "linear_attn.norm"}
        ),
        **one_plus(NORMS),
        # A matrix of one output, which some files store as a vector.
        "ffn_gate_inp_shexp": (Rule("mlp.shared_expert_gate", one_row, lambda shape: (1, shape[-1])),),
    }


def qwen3_next(keys: Keys) -> Rules:
    """Projections are ungrouped; in older files they lie as transformers has them."""
    n_groups = keys.count("ssm.group_count")
    n_each = keys.count("ssm.time_step_rank") // max(n_groups, 1)
    betas, decays = (rows(runs(n_groups, n_each, first)) for first in (0, n_each))
    return {
        **gated_delta(keys),
        "attn_qkv": (Rule("linear_attn.in_proj_qkv"),),
        "attn_gate": (Rule("linear_attn.in_proj_z"),),
        "ssm_in": (Rule("linear_attn.in_proj_qkvz"),),
        "ssm_ba": (
            Rule("linear_attn.in_proj_b", betas, half_shape),
            Rule("linear_attn.in_proj_a", decays, half_shape),
        ),
        "ssm_conv1d": (Rule("linear_attn.conv1d", unsqueezed, unsqueezed_shape),),
        "ssm_dt.bias": (Rule("linear_attn.dt_bias"),),
        "ssm_a": (Rule("linear_attn.A_log", log_of_negative),),
        "ssm_out": (Rule("linear_attn.out_proj"),),
    }


def qwen3_5(keys: Keys) -> Rules:
    """Value heads go round the key heads."""
    n_groups, d_key = keys.count("ssm.group_count"), keys.count("ssm.state_size")
    n_heads = keys.count("ssm.time_step_rank")
    n_each, d_value = n_heads // max(n_groups, 1), keys.count("ssm.inner_size") // max(n_heads, 1)
    heads, value_rows = grouped_heads(n_groups, n_each, 1), grouped_heads(n_groups, n_each, d_value)
    channels = rows(grouped_heads(n_groups, n_each, d_value, first=2 * n_groups * d_key))
    return {
        **gated_delta(keys),
        "attn_qkv": (Rule("linear_attn.in_proj_qkv", channels),),
        "attn_gate": (Rule("linear_attn.in_proj_z", rows(value_rows)),),
        "ssm_beta": (Rule("linear_attn.in_proj_b", rows(heads)),),
        "ssm_alpha": (Rule("linear_attn.in_proj_a", rows(heads)),),
        "ssm_conv1d": (Rule("linear_attn.conv1d", lambda one: unsqueezed(channels(one)), unsqueezed_shape),),
        "ssm_dt.bias": (Rule("linear_attn.dt_bias", rows(heads)),),
        "ssm_a": (Rule("linear_attn.A_log", lambda one: log_of_negative(rows(heads)(one))),),
        "ssm_out": (Rule("linear_attn.out_proj", columns(value_rows) if n_each > 1 else as_it_is),),
    }


def eagle3(keys: Keys) -> Rules:
    return {**llama(keys), "attn_norm_2": (Rule("hidden_norm"),)}


def from_own_ids(stored: Matrix) -> Matrix:
    """The target's ids as transformers has them: what is to be added to the draft's own."""
    ids = widened(stored)  # [n_draft_ids]
    return ids - torch.arange(len(ids))


_DRAFT_ENDS: Rules = {
    EMBEDDING: (Rule("embed_tokens.weight"),),
    OUTPUT: (Rule("lm_head.weight"),),
    **renamed({"output_norm": "norm", "fc": "fc", "conf_proj": "confidence_head.proj"}),
    **renamed({f"markov_w{i}": f"markov_head.markov_w{i}" for i in (1, 2)}),
    "d2t": (Rule("d2t", from_own_ids),),
}

_GLM_NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
_QWEN_NEXTN_NORMS = {
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}


def _gated_delta_dialect(rules: Callable[[Keys], Rules]) -> Dialect:
    return Dialect(
        rules=rules,
        ends={**ENDS, **one_plus(FINAL_NORM)},
        nextn_block="mtp.layers.{k}.",
        nextn_beside="mtp.",
        nextn={**renamed({"nextn.eh_proj": "fc"}), **one_plus(_QWEN_NEXTN_NORMS)},
    )


_PLAIN_ENDS = {**ENDS, **renamed(FINAL_NORM)}
_LAYER_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_PROJECTIONS = {f"nextn.{one}_projection": f"{one}_projection" for one in ("pre", "post")}
DIALECTS: Mapping[str, Dialect] = {
    "dflash": Dialect(
        rules=plain, block="layers.{n}.", ends={**_DRAFT_ENDS, **renamed({"enc.output_norm": "hidden_norm"})}
    ),
    "eagle3": Dialect(
        rules=eagle3, block="layers.{n}.", ends={**_DRAFT_ENDS, **renamed({"enc.output_norm": "input_norm"})}
    ),
    "deepseek2": Dialect(rules=deepseek2, ends=_PLAIN_ENDS, nextn=renamed(_GLM_NEXTN), merged=joint_heads),
    "gemma3": Dialect(rules=gemma3, ends={**ENDS, **one_plus(FINAL_NORM)}),
    "gemma4": Dialect(rules=gemma4, ends={**_PLAIN_ENDS, **renamed(_LAYER_INPUTS)}),
    "gemma4-assistant": Dialect(rules=gemma4, ends={**_PLAIN_ENDS, **renamed(_PROJECTIONS)}),
    "glm4moe": Dialect(rules=glm4_moe, ends=_PLAIN_ENDS, nextn=renamed(_GLM_NEXTN)),
    "gpt-oss": Dialect(rules=gpt_oss, ends=_PLAIN_ENDS, merged=joint_expert_biases),
    "kimi-linear": Dialect(rules=kimi_linear, ends=_PLAIN_ENDS, merged=joint_heads),
    "llama": Dialect(rules=llama, ends=_PLAIN_ENDS),
    **WINDOW_DIALECTS,
    "qwen2": Dialect(rules=plain, ends=_PLAIN_ENDS),
    "qwen3": Dialect(rules=plain, ends=_PLAIN_ENDS),
    "qwen35": _gated_delta_dialect(qwen3_5),
    "qwen35moe": _gated_delta_dialect(qwen3_5),
    "qwen3moe": Dialect(rules=plain, ends=_PLAIN_ENDS),
    "qwen3next": _gated_delta_dialect(qwen3_next),
}
