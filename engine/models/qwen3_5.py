"""Qwen3-Next, Qwen3.5 and Qwen3.6, dense and with experts: gated-delta layers, every fourth one gated attention.

Of the released wrapper checkpoints the text model is read. All norms are stored as what is added to 1, but the one
within a gated-delta layer.
"""

from __future__ import annotations

from functools import partial

from engine.cache.recurrent import Recurrent
from engine.layers.decoder import BlockSpec, DecoderSpec, FeedForwardSpec, MixerSpec
from engine.layers.gated_delta import GatedDeltaSpec
from engine.layers.mlp import MLPSpec
from engine.layers.moe import MoESpec, SharedSpec
from engine.layers.norm import NormSpec
from engine.models.config import ModelConfig
from kernels.moe.op import Routing

# Config keys that other families must refuse.
UNDERSTOOD = ("layer_types", "num_experts", "attn_output_gate")


def parts(config: ModelConfig, n_positions: int, vocab_size: int, *, grouped: bool) -> DecoderSpec:
    """What a decoder of this family is made of. grouped: how the projections of gated-delta layers are stored."""
    norm = NormSpec(config.norm_eps, one_plus=True)
    fields = config.fields
    if not fields.flag("attn_output_gate", default=True):
        raise fields.refuse("attn_output_gate", "attention without an output gate is not supported")
    mixers: dict[str, MixerSpec] = {
        "full_attention": config.attention(
            qkv_bias=config.attention_bias, out_bias=config.attention_bias, head_norm=norm, gated=True
        ),
        "linear_attention": GatedDeltaSpec(
            d_model=config.d_model, state=read_state(config), eps=config.norm_eps, grouped=grouped
        ),
    }
    kinds = layer_kinds(config)
    dense = dense_layers(config)
    experts = read_experts(config) if fields.has("num_experts") and fields.values["num_experts"] else None
    blocks = []
    for i, kind in enumerate(kinds):
        mlp: FeedForwardSpec = MLPSpec(config.d_model, config.d_ffn)
        blocks.append(BlockSpec(mixers[kind], mlp if experts is None or i in dense else experts))
    return config.decoder(blocks, n_positions, vocab_size, norm)


qwen3_5 = partial(parts, grouped=False)
qwen3_next = partial(parts, grouped=True)


def layer_kinds(config: ModelConfig) -> list[str]:
    """`full_attention` or `linear_attention` per layer: listed, or every so many a full one."""
    fields, n_layers = config.fields, config.n_layers
    kinds = fields.values.get("layer_types")
    if kinds is None:
        interval = fields.count("full_attention_interval", 4)
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(n_layers)]
    known = {"full_attention", "linear_attention"}
    if not isinstance(kinds, list) or len(kinds) != n_layers or not set(kinds) <= known:
        raise fields.refuse(
            "layer_types", f"must name one of {', '.join(sorted(known))} for {n_layers} layers"
        )
    return kinds


def dense_layers(config: ModelConfig) -> frozenset[int]:
    """Layers without experts in a network that has some."""
    fields = config.fields
    listed = fields.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise fields.refuse("mlp_only_layers", "must be a list of layers")
    step = fields.count("decoder_sparse_step", 1)
    return frozenset([*listed, *(i for i in range(config.n_layers) if (i + 1) % step)])


def read_state(config: ModelConfig) -> Recurrent:
    """The shape of the recurrent state. Raises `UnsupportedModel` naming key and value."""
    fields = config.fields
    n_key_heads, n_value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    if n_value_heads % n_key_heads:
        raise fields.refuse("linear_num_value_heads", f"must be a multiple of the {n_key_heads} key heads")
    if fields.text("output_gate_type", "swish") not in ("swish", "silu"):
        raise fields.refuse("output_gate_type", "must be swish")
    return Recurrent(
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        d_key=fields.count("linear_key_head_dim"),
        d_value=fields.count("linear_value_head_dim"),
        conv_width=fields.count("linear_conv_kernel_dim", 4, least=2),
    )


def read_experts(config: ModelConfig) -> MoESpec:
    """The mixture of experts beside the shared one. Raises `UnsupportedModel` naming key and value."""
    fields = config.fields
    n_experts, top_k = fields.count("num_experts"), fields.count("num_experts_per_tok")
    if top_k > n_experts:
        raise fields.refuse("num_experts_per_tok", f"must be at most the number of experts, {n_experts}")
    return MoESpec(
        d_model=config.d_model,
        d_ffn=fields.count("moe_intermediate_size"),
        n_experts=n_experts,
        routing=Routing(top_k=top_k, scores="softmax", normed=fields.flag("norm_topk_prob", default=True)),
        shared=SharedSpec(
            name="shared_expert", d_ffn=fields.count("shared_expert_intermediate_size"), gated=True
        ),
    )
