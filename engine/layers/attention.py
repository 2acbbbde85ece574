"""Grouped-query attention over the paged cache: one product for q, k and v, norms, rotation, page write."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.batch import Batch
from engine.cache.kv import FullKV
from engine.layers.linear import load_linear
from engine.weights import Weights
from kernels.attention.op import attention
from kernels.matmul.op import Packed, linear
from kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope_write


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What distinguishes the attention of one family from another's."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    qkv_bias: bool
    out_bias: bool
    head_norm_eps: float | None  # None: queries and keys are not normalised per head


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer."""

    qkv: Packed
    out: Packed
    norms: HeadNorms | None
    rope: Rope
    scale: float
    kv: FullKV

    def __call__(self, x: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """x: [n_tokens, d_model]. Writes the rows into the layer's keys and values. Returns x's shape."""
        q = norm_rope_write(linear(x, self.qkv), self.norms, self.rope, batch, keys, values)
        return linear(attention(q, keys, values, batch, self.scale), self.out)


def load_attention(weights: Weights, name: str, spec: AttentionSpec, rope: Rope) -> Attention:
    """The attention whose tensors start with `name`."""
    d_q, d_kv = spec.n_heads * spec.d_head, spec.n_kv_heads * spec.d_head
    norms = None
    if spec.head_norm_eps is not None:
        norms = HeadNorms(
            q=weights.take(f"{name}.q_norm.weight", [spec.d_head]),
            k=weights.take(f"{name}.k_norm.weight", [spec.d_head]),
            eps=spec.head_norm_eps,
        )
    inputs = [f"{name}.{part}_proj" for part in ("q", "k", "v")]
    return Attention(
        qkv=load_linear(weights, inputs, spec.d_model, [d_q, d_kv, d_kv], bias=spec.qkv_bias),
        out=load_linear(weights, [f"{name}.o_proj"], d_q, [spec.d_model], bias=spec.out_bias),
        norms=norms,
        rope=rope,
        scale=spec.d_head**-0.5,
        kv=FullKV(spec.n_kv_heads, spec.d_head),
    )
