"""How a config says that positions are turned: the rotary embedding, in both dialects of transformers."""

from __future__ import annotations

import math
from dataclasses import replace

from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.layers.rope import SCALINGS, RopeSpec, yarn_attention_factor
from slipstream.engine.models.reading.fields import Fields

GROWTH = "llama_4_scaling_beta"  # the key, among those of the rotation, of queries that count more far behind


def read_rope(fields: Fields, d_head: int, kind_of_layer: str | None = None) -> RopeSpec:
    """The rotary embedding: `rope_parameters` where present, else the older top-level keys.

    kind_of_layer: the kind it is for, if each kind has its own; None: kinds that differ are refused.
    """
    given = fields.child("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    if kind_of_layer is not None and isinstance(given.values.get(kind_of_layer), dict):
        given = given.child(kind_of_layer)
    if any(isinstance(value, dict) for value in given.values.values()):
        raise UnsupportedModel(
            f"{given.where}: different rotary embeddings per kind of layer are not supported"
        )
    key = "rope_type" if given.has("rope_type") else "type"
    kind = given.text(key, "default")
    kind = "default" if kind == "mrope" else kind  # an older word for sections, which may be there anyway
    if kind not in SCALINGS:
        raise given.refuse(key, f"must be one of {', '.join(SCALINGS)}")
    theta = (given if given.has("rope_theta") else fields).positive("rope_theta", 10000.0)
    where = given if given.has("partial_rotary_factor") else fields
    partial = where.positive("partial_rotary_factor", 1.0)
    if partial > 1:
        raise where.refuse("partial_rotary_factor", "must be at most 1")
    # A proportional rotation pairs dimensions over the whole head, and lets only some of the pairs turn.
    n_dims = d_head if kind == "proportional" else int(d_head * partial)
    if n_dims % 2 or n_dims == 0:
        raise UnsupportedModel(
            f"{fields.where}: head_dim {d_head} with partial_rotary_factor {partial}: "
            f"{n_dims} rotated dimensions, must be even and above 0"
        )
    sections, interleaved = read_sections(given, n_dims // 2)
    plain = RopeSpec(kind=kind, theta=theta, n_dims=n_dims, sections=sections, interleaved=interleaved)
    if kind == "proportional":
        return replace(plain, share=partial, factor=given.positive("factor", 1.0))
    if kind == "divided":
        return replace(plain, divisors=read_divisors(given, n_dims // 2))
    if kind != "default":
        return read_scaling(fields, given, plain)
    if given.number(GROWTH, 0.0):
        raise given.refuse(GROWTH, "not supported with a rotation that is not scaled")
    return plain


def refuse_two_scalings(fields: Fields, rope: RopeSpec) -> None:
    """Raise `UnsupportedModel` if the older key asks for another scaling than the newer, of which `rope` was read."""
    older = fields.child("rope_scaling")
    kind = older.text("rope_type" if older.has("rope_type") else "type", "default")
    if kind not in ("default", "mrope") and (kind, older.number("factor", rope.factor)) != (
        rope.kind,
        rope.factor,
    ):
        raise fields.refuse("rope_scaling", "differs from rope_parameters; give one of them")


def read_sections(given: Fields, n: int) -> tuple[tuple[int, ...], bool]:
    """How many of n frequencies turn with time, height and width, and whether the three take turns (M-RoPE).

    None do, (), where the key is absent. Where they take turns and there is no room for a section, it is cut, and what
    height and width leave is time's, as transformers does it.
    """
    key = "mrope_section"
    if not given.has(key):
        return (), False
    sections = given.values[key]
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(type(one) is int and one >= 0 for one in sections)
    ):
        raise given.refuse(key, "must be three whole numbers")
    if not given.flag("mrope_interleaved", default=False):
        if sum(sections) != n:
            raise given.refuse(key, f"must be {n} frequencies in all")
        return tuple(sections), False
    height, width = (len(range(axis, min(3 * sections[axis], n), 3)) for axis in (1, 2))
    return (n - height - width, height, width), True


def read_divisors(given: Fields, n: int) -> tuple[float, ...]:
    """What each of n frequencies is divided by."""
    divisors = given.values.get("divisors")
    if (
        not isinstance(divisors, list)
        or len(divisors) != n
        or not all(0 < one < math.inf for one in divisors)
    ):
        raise given.refuse("divisors", f"must be {n} numbers above 0")
    return tuple(divisors)


def read_scaling(fields: Fields, given: Fields, plain: RopeSpec) -> RopeSpec:
    """The spec of a scaled rotary embedding, from the scaling's own object `given`."""
    top = fields if fields.has("original_max_position_embeddings") else given
    n_ctx = top.count("original_max_position_embeddings", fields.count("max_position_embeddings"))
    if given.has("factor") or plain.kind != "yarn":
        factor = given.positive("factor")
    else:
        factor = fields.count("max_position_embeddings") / n_ctx
    low, high = given.positive("low_freq_factor", 1.0), given.positive("high_freq_factor", 4.0)
    if low >= high:
        raise given.refuse("low_freq_factor", f"must be below high_freq_factor = {high}")
    attention_factor = 1.0
    if plain.kind == "yarn":
        mscale, mscale_all = given.number("mscale", 0.0), given.number("mscale_all_dim", 0.0)
        attention_factor = given.positive(
            "attention_factor", yarn_attention_factor(factor, mscale, mscale_all)
        )
    return replace(
        plain,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        n_ctx_original=n_ctx,
        beta_fast=given.positive("beta_fast", 32.0),
        beta_slow=given.positive("beta_slow", 1.0),
        truncate=given.flag("truncate", default=True),
        attention_factor=attention_factor,
        query_growth=given.number(GROWTH, 0.0),
    )
