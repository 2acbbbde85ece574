"""What GGUF's converters call and change in models whose layers with a window have heads of another kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slipstream.engine.checkpoint.gguf.config_parts import ROPE_FACTORS
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.checkpoint.gguf.matrices import some_rows
from slipstream.engine.checkpoint.gguf.names import Dialect, Rule, Rules
from slipstream.engine.checkpoint.gguf.rule_parts import ENDS, FINAL_NORM, plain, renamed


def mimo2(keys: Keys) -> Rules:
    """Queries, keys and values may lie one below the other, which llama.cpp wants of MTP layers."""
    return {
        **plain(keys),
        "attn_qkv": joint_projections(
            keys.count("attention.head_count") * keys.d_key, keys.d_key, keys.d_value
        ),
        "attn_sinks.weight": (Rule("self_attn.attention_sink_bias"),),
        "exp_probs_b.bias": (Rule("mlp.gate.e_score_correction_bias"),),
    }


def joint_projections(n_queries: int, d_key: int, d_value: int) -> tuple[Rule, ...]:
    """The parts of what holds n_queries rows of queries, then heads of keys, then as many of values."""

    def part(which: int) -> Callable[[int], slice]:
        def rows(n_rows: int) -> slice:
            n_heads, rest = divmod(n_rows - n_queries, max(d_key + d_value, 1))
            if rest or n_heads < 1:
                raise ValueError(
                    f"has {n_rows} rows, of which {n_queries} are queries: the rest are no heads"
                )
            ends = (0, n_queries, n_queries + n_heads * d_key, n_rows)
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
}
