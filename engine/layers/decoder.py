"""The residual loop that all decoder-only families share: blocks, final norm, head on the wanted rows.

Each norm is joined with the residual addition before it, so a block is two norms, four products, and the ops
between them: nine calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch
from engine.cache.kv import KVStore
from engine.layers.attention import Attention, AttentionSpec, load_attention
from engine.layers.embed import Embedding, Head, load_embedding, load_head
from engine.layers.mlp import GatedMLP, load_mlp
from engine.layers.norm import Norm, load_norm
from engine.layers.rope import RopeSpec, rope_tables
from engine.weights import Weights
from kernels.norm_rope_write.op import Rope


@dataclass(frozen=True, slots=True)
class Block:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMLP


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole network as a function of a batch and its store."""

    embedding: Embedding
    blocks: Sequence[Block]
    norm: Norm
    head: Head

    def __call__(self, batch: Batch, store: KVStore) -> Tensor:
        """Logits of the batch's wanted rows, [n_logits, vocab] float32. Writes all rows' keys and values."""
        x = self.embedding(batch.token_ids)  # [n_tokens, d_model]
        added: Tensor | None = None  # [n_tokens, d_model]: what the last block has yet to add to x
        for block, keys, values in zip(self.blocks, store.keys, store.values, strict=True):
            if added is None:
                normed = block.attention_norm(x)
            else:
                normed, x = block.attention_norm.add(added, x)
            normed, x = block.mlp_norm.add(block.attention(normed, batch, keys, values), x)
            added = block.mlp(normed)
        if batch.logit_index.shape[0] == 0:
            return x.new_empty((0, self.head.vocab_size), dtype=torch.float32)
        assert added is not None  # a config has at least one layer
        if batch.logit_index.shape[0] != x.shape[0]:  # equal counts: all rows, in order
            x, added = x[batch.logit_index], added[batch.logit_index]  # [n_logits, d_model] each
        normed, _ = self.norm.add(added, x)
        return self.head(normed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """The parts list of a family: everything in which one decoder differs from another."""

    n_layers: int
    d_model: int
    d_ffn: int
    vocab_rows: int  # rows of the stored embedding
    vocab_size: int  # real token ids, at most vocab_rows
    n_positions: int  # rows of the rotary tables
    norm_eps: float
    tied: bool | None  # None: the tensors decide
    mlp_bias: bool
    attention: AttentionSpec
    rope: RopeSpec


def load_decoder(weights: Weights, spec: DecoderSpec) -> Decoder:
    """Build the decoder from tensors named as Llama names them. `weights.finish` is the caller's."""
    rope = Rope(*rope_tables(spec.rope, spec.n_positions, weights.device))
    embedding = load_embedding(weights, "model.embed_tokens", spec.vocab_rows, spec.d_model)
    return Decoder(
        embedding=embedding,
        blocks=[load_block(weights, f"model.layers.{i}", spec, rope) for i in range(spec.n_layers)],
        norm=load_norm(weights, "model.norm", spec.d_model, spec.norm_eps),
        head=load_head(weights, "lm_head", embedding, spec.vocab_size, tied=spec.tied),
    )


def load_block(weights: Weights, name: str, spec: DecoderSpec, rope: Rope) -> Block:
    """The block whose tensors start with `name`."""
    return Block(
        attention_norm=load_norm(weights, f"{name}.input_layernorm", spec.d_model, spec.norm_eps),
        attention=load_attention(weights, f"{name}.self_attn", spec.attention, rope),
        mlp_norm=load_norm(weights, f"{name}.post_attention_layernorm", spec.d_model, spec.norm_eps),
        mlp=load_mlp(weights, f"{name}.mlp", spec.d_model, spec.d_ffn, bias=spec.mlp_bias),
    )
