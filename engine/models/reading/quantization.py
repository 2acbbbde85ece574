"""`quantization_config` of a checkpoint -> the scheme its matrices are stored in, or a refusal by key and value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slipstream.engine.checkpoint.byte_layouts import Fp8, Int8, PackedInt8
from slipstream.engine.checkpoint.layouts import (
    Awq,
    Blocks,
    Gptq,
    Group,
    Layout,
    Mxfp4,
    PackedInt4,
    Scheme,
)
from slipstream.engine.checkpoint.safetensors_folder import text_name
from slipstream.engine.models.reading.fields import Fields

BLOCK_TYPES = "block_types"  # of configs that were made of GGUF files: matrix -> its type
KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' older name


def read_scheme(fields: Fields) -> Scheme | None:
    """The scheme of a text model's config, None if its weights are not quantised.

    Raises `UnsupportedModel` naming key, value and what is supported.
    """
    if fields.has(BLOCK_TYPES):  # a GGUF file: each matrix is in a block type of its own
        kinds = fields.child(BLOCK_TYPES).values
        return Scheme(method="gguf", by_name={name: Blocks(kind) for name, kind in kinds.items()})
    key = next((key for key in KEYS if fields.has(key)), None)
    if key is None:
        return None
    given = fields.child(key)
    method = given.text("quant_method")
    if method not in METHODS:
        raise given.refuse("quant_method", f"must be one of {', '.join(METHODS)}")
    return METHODS[method](given)


def read_fp8(given: Fields) -> Scheme:
    """Codes of eight bits, with a scale per block of outputs and inputs, or per matrix (transformers, vLLM)."""
    only(given, "fmt", "e4m3", default="e4m3")
    block = read_block(given, "weight_block_size") if given.has("weight_block_size") else None
    ignored = read_names(given, "modules_to_not_convert") or read_names(given, "ignored_layers")
    activations = f"{given.text('activation_scheme', 'dynamic')} fp8"
    return Scheme(method="fp8", groups=[Group(Fp8(block))], ignored=ignored, activations=activations)


def read_awq(given: Fields) -> Scheme:
    """AutoAWQ's files."""
    only(given, "w_bit" if given.has("w_bit") else "bits", 4)
    only(given, "zero_point", value=True, default=True)
    if given.text("version", "gemm").lower() != "gemm":
        raise given.refuse("version", 'must be "gemm"')
    n_group = read_group_size(given, "q_group_size" if given.has("q_group_size") else "group_size")
    return Scheme(
        method="awq", groups=[Group(Awq(n_group))], ignored=read_names(given, "modules_to_not_convert")
    )


def read_gptq(given: Fields) -> Scheme:
    """AutoGPTQ's and GPTQModel's files."""
    only(given, "bits", 4)
    version = given.text("checkpoint_format", "gptq")
    if version not in ZERO_SHIFTS:
        raise given.refuse("checkpoint_format", f"must be one of {', '.join(ZERO_SHIFTS)}")
    only(given, "is_marlin_format", value=False, default=False)
    rules = given.child("dynamic").values
    if not all(rule.startswith("-:") for rule in rules):
        raise given.refuse("dynamic", 'only rules that leave modules alone, "-:", are supported')
    layout = Gptq(
        read_group_size(given, "group_size"),
        given.flag("desc_act", default=False),
        ZERO_SHIFTS[version],
    )
    ignored = ["re:" + rule.removeprefix("-:") for rule in rules]
    return Scheme(method="gptq", groups=[Group(layout)], ignored=ignored)


def read_mxfp4(given: Fields) -> Scheme:
    """gpt-oss's files: only the experts are narrow, so what the config says of other modules changes nothing."""
    return Scheme(method="mxfp4", groups=[Group(Mxfp4(), ["experts"])])


def read_compressed(given: Fields) -> Scheme:
    """Files of compressed-tensors, with a layout for each group of modules."""
    whole = given.text("format", "mixed-precision")
    for key in ("kv_cache_scheme", "transform_config"):
        if given.values.get(key):
            raise given.refuse(key, "not supported")
    if given.child("sparsity_config").text("format", "dense") != "dense":
        raise given.refuse("sparsity_config", "only dense weights are supported")
    parts = given.child("config_groups")
    groups, activations = [], None
    for name in parts.values:
        part = parts.child(name)
        layout = read_layout(part, part.text("format", whole))
        targets = read_names(part, "targets")
        groups.append(Group(layout, None if "Linear" in targets else targets))
        if part.has("input_activations"):
            inputs = part.child("input_activations")
            activations = f"{inputs.text('type', 'int')}{inputs.count('num_bits', 8)}"
    if not groups:
        raise given.refuse("config_groups", "must describe at least one group")
    return Scheme(
        method="compressed-tensors",
        groups=groups,
        ignored=read_names(given, "ignore"),
        activations=activations,
    )


def read_layout(part: Fields, form: str) -> Layout:
    """The layout of one group of compressed-tensors. form: what `format` says of it."""
    weights = part.child("weights")
    strategy = weights.text("strategy", "tensor")
    if form == "float-quantized":
        only(weights, "type", "float")
        only(weights, "num_bits", 8)
        only(weights, "symmetric", value=True, default=True)
        if strategy == "block":
            return Fp8(read_block(weights, "block_structure"))
        if strategy not in ("tensor", "channel"):
            raise weights.refuse("strategy", "must be one of tensor, channel, block")
        return Fp8(None)
    if form == "int-quantized":
        only(weights, "type", "int", default="int")
        only(weights, "num_bits", 8)
        only(weights, "symmetric", value=True, default=True)
        if strategy not in ("tensor", "channel"):
            raise weights.refuse("strategy", "must be one of tensor, channel")
        return Int8()
    if form == "pack-quantized":
        only(weights, "type", "int", default="int")
        if strategy not in ("group", "channel"):
            raise weights.refuse("strategy", "must be one of group, channel")
        n_group = read_group_size(weights, "group_size") if strategy == "group" else None
        if weights.values.get("num_bits") == 8:
            only(weights, "symmetric", value=True, default=True)
            return PackedInt8(n_group)
        if weights.values.get("num_bits") != 4:
            raise weights.refuse("num_bits", "must be 4 or 8")
        return PackedInt4(n_group, weights.flag("symmetric", default=True))
    raise Fields({"format": form}, part.where).refuse(
        "format", "must be one of float-quantized, int-quantized, pack-quantized"
    )


def only(given: Fields, key: str, value: Any, default: Any = None) -> None:
    """Raise `UnsupportedModel` unless a key has the only value that is supported."""
    found = given.values.get(key)
    found = default if found is None else found
    if type(found) is not type(value) or found != value:
        raise given.refuse(key, f"must be {str(value).lower() if isinstance(value, bool) else value}")


def read_group_size(given: Fields, key: str) -> int | None:
    """Inputs that share a scale; None, written -1, for all."""
    if given.values.get(key) == -1:
        return None
    return given.count(key)


def read_block(given: Fields, key: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    block = given.values.get(key)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise given.refuse(key, "must be two whole numbers above 0")
    return block[0], block[1]


def read_names(given: Fields, key: str) -> Sequence[str]:
    """A list of patterns, with the names that tensors have in a checkpoint of the text model alone."""
    names = given.values.get(key) or []
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise given.refuse(key, "must be a list of names")
    return [text_name(one) for one in names]


METHODS: dict[str, Callable[[Fields], Scheme]] = {
    "fp8": read_fp8,
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed,
    "mxfp4": read_mxfp4,
}
# What is added to a stored zero point, by `checkpoint_format`.
ZERO_SHIFTS = {"gptq": 1, "gptq_v2": 0}
