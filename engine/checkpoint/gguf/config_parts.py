"""What the configs of several architectures are made of, as read from a GGUF file: rotations, windows, experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from slipstream.engine.checkpoint.gguf.header import Stored
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.checkpoint.gguf.matrices import map_file, read_stored
from slipstream.engine.errors import UnsupportedModel

Config = dict[str, Any]
FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"
EMBEDDING, OUTPUT, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
SCALINGS = ("none", "linear", "yarn")


def rope(keys: Keys) -> Config:
    """The rotary embedding of full layers."""
    n_dims, kind = keys.count("rope.dimension_count", keys.d_head), keys.text("rope.scaling.type", "linear")
    if kind not in SCALINGS:
        raise keys.refuse("rope.scaling.type", f"must be one of {', '.join(SCALINGS)}")
    plain = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": share(n_dims, keys.d_head),
    }
    factor = 1.0 if kind == "none" else keys.number("rope.scaling.factor", 1.0) or 1.0  # 0: not scaled
    if ROPE_FACTORS in keys.tensors:
        if factor != 1.0:
            raise keys.refuse("rope.scaling.factor", f"not supported beside {ROPE_FACTORS}")
        return {**plain, "rope_type": "divided", "divisors": read_factors(keys.tensor(ROPE_FACTORS))}
    if factor == 1.0:
        return plain
    return {**plain, "rope_type": kind, "factor": factor, **(yarn(keys) if kind == "yarn" else {})}


def share(part: int, whole: int) -> float:
    """Of a whole number; what a network makes of the share is the part again, which rounding must not make one less."""
    near = part / max(whole, 1)
    return near if int(near * whole) == part else math.nextafter(near, math.inf)


def unscaled_rope(keys: Keys, kind: str, width: int, n_dims: int) -> Config:
    """The rotation of n_dims of a head in layers of one kind, where it is not stretched.

    Raises `UnsupportedModel` naming the key that stretches it.
    """
    if keys.text("rope.scaling.type", "none") not in ("none", "linear"):
        raise keys.refuse("rope.scaling.type", "not supported")
    if keys.number("rope.scaling.factor", 1.0) not in (0.0, 1.0):
        raise keys.refuse("rope.scaling.factor", "not supported")
    base = "rope.freq_base_swa" if kind == SLIDING else "rope.freq_base"
    return {
        "rope_type": "default",
        "rope_theta": keys.number(base, 10000.0),
        "partial_rotary_factor": share(n_dims, width),
    }


def read_factors(stored: Stored) -> list[float]:
    """What each frequency is divided by."""
    factors = read_stored(map_file(stored.path), stored)
    if stored.kind != "F32" or not isinstance(factors, Tensor) or factors.dim() != 1:
        raise UnsupportedModel(
            f"{stored.where} is {stored.kind} {list(stored.shape)}, must be a vector of F32"
        )
    return [float(one) for one in factors.tolist()]


def yarn(keys: Keys) -> Config:
    """What YaRN adds."""
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise keys.refuse("rope.scaling.yarn_ext_factor", "only 1 is supported")
    attention = "rope.scaling.yarn_attn_factor"
    return {
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        "attention_factor": keys.number(attention) if keys.has(attention) else None,
    }


def windows(keys: Keys, every: int) -> Config:
    """Sliding layers, unless the file lists them all but every so many."""
    n_layers = keys.n_layers
    if not keys.count("attention.sliding_window", 0):
        return {"layer_types": [FULL] * n_layers, "sliding_window": None}
    listed = keys.flags("attention.sliding_window_pattern", n_layers)
    slides = [bool((i + 1) % every) for i in range(n_layers)] if listed is None else listed
    return listed_windows(keys, slides)


def listed_windows(keys: Keys, slides: Sequence[bool]) -> Config:
    """Which layers slide, and over how many positions."""
    return {
        "layer_types": [SLIDING if one else FULL for one in slides],
        "sliding_window": keys.count("attention.sliding_window"),
    }


def sliding_layers(keys: Keys, n: int) -> list[bool]:
    """Whether each of n layers has a window, which the file must say."""
    name = "attention.sliding_window_pattern"
    slides = keys.flags(name, n)
    if slides is None:
        raise keys.missing(name)
    return slides


def by_kind(keys: Keys, name: str, slides: Sequence[bool]) -> tuple[int, int]:
    """What layers with a window have under a key, and those without; where all are of one kind, twice the same.

    Raises `UnsupportedModel` if layers of one kind differ.
    """
    counts = keys.counts(name, len(slides))
    sliding, full = (
        {n for n, one in zip(counts, slides, strict=True) if one is kind} for kind in (True, False)
    )
    if max(len(sliding), len(full)) > 1:
        raise keys.refuse(name, "layers of one kind must have the same number")
    default = counts[0] if counts else 0
    return min(sliding, default=default), min(full, default=default)


def sparse_layers(keys: Keys, numbers: Sequence[int]) -> list[str]:
    """Whether each layer has experts: those that do have a router."""
    return [SPARSE if f"blk.{i}.ffn_gate_inp.weight" in keys.tensors else DENSE for i in numbers]


def experts(keys: Keys, of_all: str = "num_experts") -> Config:
    """Experts whose weights sum to 1. of_all: what the family calls their number."""
    return {
        of_all: keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def refuse_other_gating(keys: Keys, default: int | None = 2) -> None:
    """Raise `UnsupportedModel` where experts are not chosen by a sigmoid. default: of a file that does not say."""
    if keys.count("expert_gating_func", default) != 2:
        raise keys.refuse("expert_gating_func", "only 2, a sigmoid, is supported")


def experts_scale(keys: Keys) -> float:
    """What experts chosen are multiplied by."""
    return keys.number("expert_weights_scale", 0.0) or 1.0  # 0: not scaled
