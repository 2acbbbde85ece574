"""Llama 3.x, and Mistral without a sliding window: the plain block, with biases only if the config asks."""

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
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
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
        mlp_bias=config.mlp_bias,
        attention=attention,
        rope=config.rope,
    )
