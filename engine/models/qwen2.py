"""Qwen2 and Qwen2.5: the Llama block with a bias on q, k and v, whatever the config says of biases."""

from __future__ import annotations

from engine.layers.attention import AttentionSpec
from engine.layers.decoder import DecoderSpec
from engine.models.config import ModelConfig


def parts(config: ModelConfig, n_positions: int, vocab_size: int) -> DecoderSpec:
    """What a decoder of this family is made of."""
    attention = AttentionSpec(
        d_model=config.d_model,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.d_head,
        qkv_bias=True,
        out_bias=False,
        head_norm_eps=None,
    )
    return DecoderSpec(
        n_layers=config.n_layers,
        d_model=config.d_model,
        d_ffn=config.d_ffn,
        vocab_rows=config.vocab_rows,
        vocab_size=vocab_size,
        n_positions=n_positions,
        norm_eps=config.norm_eps,
        tied=config.tied,
        mlp_bias=False,
        attention=attention,
        rope=config.rope,
    )
