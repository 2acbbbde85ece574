"""Strict reader of a checkpoint's config and its defaults of generation, in both dialects of transformers.

A key that asks for a computation the network does not have is refused by key and value. Keys that change nothing
about the function computed are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.checkpoint.layouts import Scheme
from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.layers.attention import AttentionSpec
from slipstream.engine.layers.decoder import BlockSpec, DecoderSpec
from slipstream.engine.layers.norm import NormSpec
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.models.reading.documents import read_documents
from slipstream.engine.models.reading.fields import MOST_PARTS, Fields
from slipstream.engine.models.reading.quantization import KEYS as QUANTIZATION_KEYS
from slipstream.engine.models.reading.quantization import read_scheme
from slipstream.engine.models.reading.rotation import GROWTH, read_rope, refuse_two_scalings
from slipstream.engine.models.reading.unsupported import unknown_architecture
from slipstream.engine.ranges import SAMPLING_RANGES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Keys that change the function computed, with the values under which they do not. A key that is absent or
# null is harmless everywhere; a key that a family understands is read by that family.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    **dict.fromkeys(QUANTIZATION_KEYS, ()),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "query_pre_attn_scalar": (),
    "clip_qkv": (0,),
    "no_rope_layers": ((),),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "attn_output_gate": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}

FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
FULL_EVERY = "sliding_window_pattern"  # the key of older files: every n-th layer is full
# What it calls a default -> the request field.
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a network and what its checkpoint says about using it."""

    architecture: str
    d_model: int
    d_ffn: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    vocab_rows: int  # rows of the embedding; the tokenizer may use fewer
    n_ctx_train: int
    norm_eps: float
    rope: RopeSpec  # of full layers, where kinds of layers differ
    tied: bool | None  # None: the checkpoint does not say, its tensors decide
    attention_bias: bool
    mlp_bias: bool
    dtype: torch.dtype  # of the stored weights
    sampling: Mapping[str, float | int]  # defaults of generation_config.json by request field
    suppressed: tuple[int, ...]  # tokens that are banned unless a request says otherwise
    quantization: Scheme | None = None  # how matrices of few bits are stored
    # All keys of the text model, for those that a single family reads.
    fields: Fields = field(compare=False, repr=False)
    heeded: Collection[str] = ()  # keys among `fields` that other families would have to refuse

    @property
    def norm(self) -> NormSpec:
        """The plain norm, on queries and keys too where a family has them there."""
        return NormSpec(self.norm_eps)

    @property
    def windows(self) -> list[int | None]:
        """Per layer, how many positions a row sees, its own included; None: all before it.

        Raises `UnsupportedModel` for kinds of layers that are neither full nor sliding.
        """
        fields, n = self.fields, self.n_layers
        has_window = fields.has("sliding_window") and fields.flag("use_sliding_window", default=True)
        window = fields.count("sliding_window") if has_window else None
        if window is None or "layer_types" not in self.heeded:
            return [None] * n  # `refuse_sliding_window` has checked the second
        kinds = fields.names("layer_types", (FULL, SLIDING), n)
        if kinds is None:
            first, every = fields.count("max_window_layers", 0, least=0), fields.count(FULL_EVERY, n + 1)
            kinds = [SLIDING if i >= first and (i + 1) % every else FULL for i in range(n)]
        return [window if kind == SLIDING else None for kind in kinds]

    def attention(self, **changes: Any) -> AttentionSpec:
        """Attention of this shape; `changes` are fields of `AttentionSpec` in which a family differs."""
        shape: dict[str, Any] = {
            "d_model": self.d_model,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "d_head": self.d_head,
            "rope": self.rope,
            "qkv_bias": self.attention_bias,
            "out_bias": self.attention_bias,
        }
        return AttentionSpec(**{**shape, **changes})

    def decoder(self, blocks: Sequence[BlockSpec], **changes: Any) -> DecoderSpec:
        """A decoder of these blocks; `changes` are other fields of `DecoderSpec` in which a family differs."""
        plain = DecoderSpec(
            d_model=self.d_model,
            vocab_rows=self.vocab_rows,
            vocab_size=self.vocab_rows,
            norm=self.norm,
            tied=self.tied,
            blocks=blocks,
        )
        return replace(plain, **changes)


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture is built, and how its config is read."""

    parts: Callable[[ModelConfig], DecoderSpec]
    understood: Collection[str] = ()  # config keys it heeds that others would have to refuse
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config keys that its checkpoints leave out
    # Puts its checkpoints' keys into the words of transformers.
    dialect: Callable[[Fields], Fields] = lambda fields: fields


def read_config(path: Path | str, families: Mapping[str, Family] | None = None) -> ModelConfig:
    """The config of a checkpoint folder. Raises `UnsupportedModel` naming key and value, or `LoadError`.

    path: the folder, a GGUF file, or a config file, whose generation_config.json lies beside it if anywhere.
    families: by architecture; others are not supported. None: any is, and heeds no key that is not every family's.
    """
    outer, generation = read_documents(Path(path))
    architecture, fields = read_architecture(outer), text_fields(outer)
    heeded: Collection[str] = ()
    if families is not None:
        if architecture not in families:
            raise unknown_architecture(architecture, fields, families)
        family = families[architecture]
        fields, heeded = family.dialect(fields.over(family.defaults)), family.understood
    refuse_unsupported(fields, {*heeded, *QUANTIZATION_KEYS})
    refuse_sliding_window(fields, heeded)
    d_model = fields.count("hidden_size")
    n_heads = fields.count("num_attention_heads")
    n_kv_heads = fields.count("num_key_value_heads", n_heads)
    # Of latent attention only a part of a head is rotated; what transformers writes as head_dim is its width.
    key = "qk_rope_head_dim" if fields.has("qk_rope_head_dim") else "head_dim"
    d_head = fields.count(key, d_model // n_heads or None)
    if n_heads % n_kv_heads:
        raise fields.refuse("num_key_value_heads", f"must divide num_attention_heads = {n_heads}")
    rope = read_rope(fields, d_head, FULL if "layer_types" in heeded else None)
    refuse_two_scalings(fields, rope)
    if rope.query_growth and GROWTH not in heeded:
        raise UnsupportedModel(f"{fields.where}: {GROWTH} = {rope.query_growth}: not supported")
    return ModelConfig(
        architecture=architecture,
        d_model=d_model,
        # If every layer has experts, there need not be a width of dense layers.
        d_ffn=fields.count("intermediate_size", fields.values.get("moe_intermediate_size")),
        n_layers=fields.count("num_hidden_layers", most=MOST_PARTS),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        vocab_rows=fields.count("vocab_size"),
        n_ctx_train=fields.count("max_position_embeddings", fields.values.get("model_max_length")),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=rope,
        tied=fields.flag("tie_word_embeddings", default=False) if fields.has("tie_word_embeddings") else None,
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        dtype=read_dtype(fields),
        sampling=read_sampling(generation),
        suppressed=read_suppressed(generation),
        quantization=read_scheme(fields),
        fields=fields,
        heeded=heeded,
    )


def text_fields(outer: Fields) -> Fields:
    """The keys of the text model: all of them, or those under `text_config` of a wrapper for several media.

    The wrapper's values win for tying, dtype and quantisation. A wrapper that is not tied around a text model that is
    does not say: transformers wrote so before version 5, and it is left to the tensors.
    """
    if not outer.has("text_config"):
        return outer
    inner = outer.child("text_config")
    shared = {
        key: outer.values[key]
        for key in ("tie_word_embeddings", "dtype", "torch_dtype", *QUANTIZATION_KEYS)
        if outer.has(key)
    }
    if outer.values.get("tie_word_embeddings") is False and inner.values.get("tie_word_embeddings") is True:
        shared["tie_word_embeddings"] = None
    return Fields({**inner.values, **shared}, inner.where)


def read_architecture(fields: Fields) -> str:
    """The only name under `architectures`."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.refuse("architectures", "must be a list of one name")
    return names[0]


def read_dtype(fields: Fields) -> torch.dtype:
    """The dtype of the stored weights; float32 if the checkpoint does not say."""
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise fields.refuse(key, f"must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def refuse_unsupported(fields: Fields, understood: Collection[str] = ()) -> None:
    """Raise `UnsupportedModel` for the first key that asks for something its family does not do."""
    for key, harmless in HARMLESS.items():
        if key in understood:
            continue
        value = fields.values.get(key)
        value = tuple(value) if isinstance(value, list) else value
        if value is not None and value not in harmless:
            raise fields.refuse(key, "not supported")


def refuse_other_activations(fields: Fields) -> None:
    """Raise `UnsupportedModel` unless feed-forward layers are gated by the tanh form of GELU, as Gemma's."""
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    if fields.text(key, "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise fields.refuse(key, "must be gelu_pytorch_tanh")


def refuse_sliding_window(fields: Fields, understood: Collection[str] = ()) -> None:
    """Raise `UnsupportedModel` if any layer would not attend to the whole context, and its family heeds no such key."""
    kinds = fields.values.get("layer_types")
    if "layer_types" in understood:
        return
    if kinds is not None:
        if not isinstance(kinds, list) or not kinds or any(kind != FULL for kind in kinds):
            raise fields.refuse("layer_types", "only full_attention is supported")
        return
    if not fields.has("sliding_window") or not fields.flag("use_sliding_window", default=True):
        return
    reaches_all = fields.count("sliding_window") >= fields.count("max_position_embeddings")
    first = fields.values.get("max_window_layers")
    no_layer = isinstance(first, int) and first >= fields.count("num_hidden_layers")
    if not reaches_all and not no_layer:
        raise fields.refuse("sliding_window", "sliding windows are not supported")


def read_sampling(fields: Fields) -> dict[str, float | int]:
    """Sampling defaults of a generation_config.json by request field."""
    found: dict[str, float | int] = {}
    for key, name in SAMPLING_KEYS.items():
        if not fields.has(key):
            continue
        value = fields.number(key)
        least, most = SAMPLING_RANGES[name]
        if not least <= value <= most:
            raise fields.refuse(key, f"out of range, which is {least} to {most}")
        found[name] = int(value) if key == "top_k" else value
    if not fields.flag("do_sample", default=True):
        found["temperature"] = 0.0  # the checkpoint asks for greedy decoding
    return found


def read_suppressed(fields: Fields) -> tuple[int, ...]:
    """The tokens that a generation_config.json bans."""
    ids = fields.values.get("suppress_tokens") or []
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise fields.refuse("suppress_tokens", "must be a list of token ids")
    return tuple(ids)
