"""Config keys of released Step files, put into the words in which transformers writes them.

Lists of one entry per layer may go on with the layers of multi-token prediction; as in transformers, the tails of
kinds get keys of their own. Where transformers and the released code read a config differently, it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.engine.models.families.routed_experts import DENSE, SPARSE
from slipstream.engine.models.reading.config import FULL, SLIDING
from slipstream.engine.models.reading.fields import MOST_PARTS, Fields

RENAMED = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
MTP = "num_nextn_predict_layers"


def with_common_keys(fields: Fields) -> Fields:
    """The same in the words of transformers. Raises `UnsupportedModel` naming key and value."""
    values = dict(fields.values)
    for released, common in RENAMED.items():
        if fields.has(released):
            if fields.has(common) and fields.values[common] != fields.values[released]:
                raise fields.refuse(released, f"differs from {common}")
            values[common] = fields.values[released]
    fields = Fields(values, fields.where)
    n, n_all = n_layers(fields)
    kinds = listed_kinds(fields, "layer_types", (FULL, SLIDING))
    if kinds is None:
        raise fields.refuse("layer_types", f"must name {FULL} or {SLIDING} for {n} layers")
    ffns = listed_kinds(fields, "mlp_layer_types", (DENSE, SPARSE))
    if ffns is None:
        sparse = listed_layers(fields, "moe_layers_enum", n_all)
        ffns = [SPARSE if i in sparse else DENSE for i in range(n_all)]
    for key, all_kinds in (("layer_types", kinds), ("mlp_layer_types", ffns)):
        values[key] = all_kinds[:n]
        if len(all_kinds) > n:
            values[f"mtp_{key}"] = all_kinds[n:]
    values["rope_parameters"] = rotations(fields, kinds)
    if not fields.has("num_sliding_attention_heads"):
        values["num_sliding_attention_heads"] = sliding_heads(fields)
    return Fields(values, fields.where)


def n_layers(fields: Fields) -> tuple[int, int]:
    """How many layers the network has, and how many with those of multi-token prediction."""
    n = fields.count("num_hidden_layers", most=MOST_PARTS)
    return n, n + fields.count(MTP, 0, least=0, most=MOST_PARTS)


def per_layer(fields: Fields, key: str) -> list[Any]:
    """The list under a key, of one entry per layer, with or without those of multi-token prediction."""
    n, n_all = n_layers(fields)
    value = fields.values[key]
    if not isinstance(value, list) or len(value) not in (n, n_all):
        raise fields.refuse(key, f"must be a list of {n} or, with {MTP}, {n_all}")
    return value


def listed_kinds(fields: Fields, key: str, known: Sequence[str]) -> list[str] | None:
    """The kinds of layers under a key; None if it is absent."""
    if not fields.has(key):
        return None
    return fields.names(key, known, len(per_layer(fields, key)))


def listed_layers(fields: Fields, key: str, n: int) -> set[int]:
    """Numbers of layers below n: a list, or a string with commas."""
    value = fields.values.get(key)
    items = [one for one in value.split(",") if one.strip()] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(str(one).strip().isdecimal() and int(one) < n for one in items):
        raise fields.refuse(key, f"must list layers below {n}")
    return {int(one) for one in items}


def rotations(fields: Fields, kinds: Sequence[str]) -> dict[str, Any]:
    """`rope_parameters` with the rotation of each kind of layer. kinds: of all layers, in order."""
    given = fields.child("rope_parameters")
    if any(isinstance(given.values.get(kind), dict) for kind in (FULL, SLIDING)):
        return dict(given.values)
    scaling, found = read_scaling(fields), {}
    for kind in dict.fromkeys(kinds):
        own = {
            "rope_theta": of_kind(fields, "rope_theta", kind, kinds, 1e4),
            "partial_rotary_factor": of_kind(fields, "partial_rotary_factors", kind, kinds, 1.0),
        }
        found[kind] = {**(scaling if kind == FULL else {}), **own}
    return found


def of_kind(fields: Fields, key: str, kind: str, kinds: Sequence[str], default: float) -> Any:
    """What all layers of a kind have under a key: one value for all layers, or one per layer."""
    if not fields.has(key):
        return default
    if not isinstance(fields.values[key], list):
        return fields.values[key]
    own = [one for one, of in zip(per_layer(fields, key), kinds, strict=False) if of == kind]
    if any(one != own[0] for one in own):
        raise fields.refuse(key, f"must be one for all layers of {kind}")
    return own[0]


def read_scaling(fields: Fields) -> dict[str, Any]:
    """How the rotation of full layers is stretched; empty if it is not."""
    key = next((key for key in ("rope_scaling", "rope_parameters") if fields.has(key)), None)
    if key is None:
        return {}
    given = fields.child(key)
    if not given.has("rope_type") and not given.has("type"):
        raise given.refuse("rope_type", "must name the scaling")
    if given.has("rope_theta"):
        raise given.refuse("rope_theta", f"must stand beside {key}, for all layers or for each")
    if fields.values.get("yarn_only_types") != [FULL]:
        raise fields.refuse("yarn_only_types", f'must be ["{FULL}"], the layers that {key} is for')
    return dict(given.values)


def sliding_heads(fields: Fields) -> int:
    """Query heads of sliding layers: an object gives them, else they are those of full layers."""
    other = fields.child("attention_other_setting")
    if other.text("attention_type", SLIDING) != SLIDING:
        raise other.refuse("attention_type", f"must be {SLIDING}")
    shared = {
        "num_attention_groups": "num_key_value_heads",
        "head_dim": "head_dim",
        "true_head_dim": "head_dim",
    }
    for key, common in shared.items():
        if other.has(key) and other.values[key] != fields.values.get(common):
            raise other.refuse(key, "must be that of full layers")
    return other.count("num_attention_heads", fields.count("num_attention_heads"))
