"""What GGUF's converters call and change in models whose layers with a window have heads of another kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slipstream.engine.checkpoint.gguf.config_parts import ROPE_FACTORS
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.checkpoint.gguf.matrices import some_rows
from slipstream.engine.checkpoint.gguf.names import Dialect, Rule, Rules
from slipstream.engine.checkpoint.gguf.rule_parts import (
    ENDS,
    EXPERTS,
    FINAL_NORM,
    MATRICES,
    NORMS,
    one_plus,
    plain,
    renamed,
    shared_expert,
)

Split = Callable[[int], tuple[int, int]]  # of so many rows: those of queries, those of keys


def mimo2(keys: Keys) -> Rules:
    """Queries, keys and values may lie one below the other, which llama.cpp wants of MTP layers."""
    n_queries, d_key, d_value = keys.count("attention.head_count") * keys.d_key, keys.d_key, keys.d_value

    def split(n_rows: int) -> tuple[int, int]:
        n_heads, rest = divmod(n_rows - n_queries, max(d_key + d_value, 1))
        if rest or n_heads < 1:
            raise ValueError(f"has {n_rows} rows, of which {n_queries} are queries: the rest are no heads")
        return n_queries, n_heads * d_key

    return {
        **plain(keys),
        "attn_qkv": joint_projections(split),
        "attn_sinks.weight": (Rule("self_attn.attention_sink_bias"),),
    }


def step35(keys: Keys) -> Rules:
    """Norms are stored as what a row is multiplied by. Kinds of layers differ in their queries alone."""
    n_keys = keys.count("attention.head_count_kv") * keys.d_head

    def split(n_rows: int) -> tuple[int, int]:
        if n_rows <= 2 * n_keys:
            raise ValueError(f"has {n_rows} rows, of which {2 * n_keys} are keys and values")
        return n_rows - 2 * n_keys, n_keys

    names = {**MATRICES, **EXPERTS, **shared_expert("mlp.shared_experts"), "attn_gate": "self_attn.g_proj"}
    return {
        **renamed(names),
        **one_plus(NORMS),
        "attn_qkv": joint_projections(split),
    }


def joint_projections(split: Split) -> tuple[Rule, ...]:
    """Queries, keys and values that lie one below the other. split: raises ValueError for rows that are no heads."""

    def part(which: int) -> Callable[[int], slice]:
        def rows(n_rows: int) -> slice:
            n_queries, n_keys = split(n_rows)
            ends = (0, n_queries, n_queries + n_keys, n_rows)
            return slice(ends[which], ends[which + 1])

        return rows

    return tuple(
        Rule(f"self_attn.{name}_proj", some_rows(part(which)), some_rows_shape(part(which)))
        for which, name in enumerate("qkv")
    )


def some_rows_shape(part: Callable[[int], slice]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """The shape of some rows; of rows that cannot be parted, which the reader refuses, that of all."""

    def shape(stored: tuple[int, ...]) -> tuple[int, ...]:
        try:
            kept = part(stored[0])
        except ValueError:
            return stored
        return (kept.stop - kept.start, *stored[1:])

    return shape


# An MTP layer is a block with other names for two of its norms.
_MIMO2_NEXTN = renamed(
    {
        "nextn.eh_proj": "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "ffn_norm": "pre_mlp_layernorm",
        "layer_output_norm": "final_layernorm",
    }
)
_STEP35_NEXTN = {
    **renamed(
        {
            "nextn.eh_proj": "eh_proj",
            "nextn.embed_tokens": "embed_tokens",
            "nextn.shared_head_head": "transformer.shared_head.output",
        }
    ),
    **one_plus(
        {
            "nextn.enorm": "enorm",
            "nextn.hnorm": "hnorm",
            "nextn.shared_head_norm": "transformer.shared_head.norm",
        }
    ),
}
# No frequency is divided.
_ENDS = {name: rule for name, rule in {**ENDS, **renamed(FINAL_NORM)}.items() if name != ROPE_FACTORS}
WINDOW_DIALECTS: Mapping[str, Dialect] = {
    "mimo2": Dialect(
        rules=mimo2,
        ends=_ENDS,
        nextn_block="model.mtp.layers.{k}.",
        nextn_beside="model.mtp.layers.{k}.",
        nextn=_MIMO2_NEXTN,
    ),
    "step35": Dialect(rules=step35, ends={**ENDS, **one_plus(FINAL_NORM)}, nextn=_STEP35_NEXTN),
}
