"""Attention to keys and values that an earlier layer of the same pass has written: queries alone (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.kv import KVLayer, SharedKV
from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.attention import AttentionSpec, Ropes, pages_of
from slipstream.engine.layers.linear import load_linear
from slipstream.engine.layers.norm import load_scale
from slipstream.engine.layers.rope import RopeSpec
from slipstream.kernels.attention.op import attention
from slipstream.kernels.matmul.op import Packed, linear
from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope

# Files may hold what such a layer does not read.
UNREAD = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """One layer."""

    q: Packed
    out: Packed
    norms: HeadNorms | None
    rope: Rope
    scale: float
    d_head: int
    window: int | None
    need: SharedKV

    def __call__(self, x: Tensor, batch: Batch, layer: KVLayer) -> Tensor:
        """x: [n_tokens, d_model]. Returns x's shape. layer: the other layer's, whose rows of this pass are written."""
        rows = pages_of(batch, self.window)
        q = norm_rope(linear(x, self.q), self.d_head, self.norms, rows.rope or self.rope, rows)
        mixed = attention(q, layer.keys, layer.values, rows, self.scale, self.window)
        return linear(mixed, self.out)


@dataclass(frozen=True, slots=True)
class SharedAttentionSpec:
    """What distinguishes one such layer from another. Its tensors are `self_attn.*`."""

    ops: ClassVar[tuple[str, ...]] = ("attention", "norm_rope_write")

    like: AttentionSpec  # what the other layer computes
    source: int  # its number

    def split(self, n: int) -> SharedAttentionSpec:
        """What each of n ranks computes. Raises `SettingError`."""
        return replace(self, like=self.like.split(n))

    @property
    def need(self) -> SharedKV:
        """What the layer needs from a `Store`."""
        return SharedKV(self.source)

    @property
    def rope(self) -> RopeSpec:
        """The rotary embedding it reads."""
        return self.like.rope

    def load(self, weights: TensorSource, block: str, ropes: Ropes) -> SharedAttention:
        """The attention of the block whose tensors start with `block`."""
        name, like = f"{block}.self_attn", self.like
        d_q, norms = like.n_heads * like.d_head, None
        if like.head_norm is not None:
            scale = load_scale(weights, f"{name}.q_norm", like.d_head, like.head_norm)
            norms = HeadNorms(scale, scale, like.head_norm.eps)
        weights.leave(f"{name}.{one}" for one in UNREAD)
        return SharedAttention(
            q=load_linear(weights, [f"{name}.q_proj"], like.d_model, [d_q], bias=like.qkv_bias),
            out=load_linear(weights, [f"{name}.o_proj"], d_q, [like.d_model], bias=like.out_bias),
            norms=norms,
            rope=ropes[like.rope],
            scale=like.score_scale,
            d_head=like.d_head,
            window=like.window,
            need=self.need,
        )
