"""Multi-head latent attention: queries of each head over one latent per position (DeepSeek-V2, arXiv 2405.04434, 2.1).

Keys and values are products of the latent with a matrix for each head. They are never made: those of keys are moved to
the queries, those of values behind the weighted sum, for every row alike (the absorbed form).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.latent import Latent, LatentLayer
from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.attention import Ropes
from slipstream.engine.layers.linear import load_linear
from slipstream.engine.layers.norm import Norm, NormSpec, load_norm, load_scale
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.ranks import share
from slipstream.kernels.matmul.op import Packed, linear
from slipstream.kernels.matmul.quantized import widened
from slipstream.kernels.mla.op import (
    LatentNorm,
    LatentRope,
    PackedHeads,
    head_linear,
    latent_attention,
    pack_heads,
    write_latents,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """One layer."""

    spec: LatentAttentionSpec
    need: Latent
    compress: Packed | None  # of queries, where they have a latent of their own; then a norm
    query_norm: Norm | None
    queries: Packed
    latents: Packed  # and the key that is rotated
    norm: LatentNorm
    rope: LatentRope
    keys: PackedHeads  # [n_heads, d_latent, d_plain]
    values: PackedHeads  # [n_heads, d_value, d_latent]
    out: Packed

    def __call__(self, x: Tensor, batch: Batch, layer: LatentLayer) -> Tensor:
        """x: [n_tokens, d_model]. Writes the rows into the layer's latents. Returns x's shape."""
        spec, said = self.spec, x
        if self.compress is not None and self.query_norm is not None:
            said = self.query_norm(linear(x, self.compress))  # [n_tokens, d_query_latent]
        q = linear(said, self.queries).view(x.shape[0], spec.n_heads, spec.d_plain + self.need.d_rope)
        kv = linear(x, self.latents)  # [n_tokens, d_latent + d_rope]
        q_rope = write_latents(q, kv, self.norm, self.rope, batch, layer.latents)
        absorbed = head_linear(q[..., : spec.d_plain], self.keys)  # [n_tokens, n_heads, d_latent]
        mixed = latent_attention(absorbed, q_rope, layer.latents, batch, spec.scale)
        return linear(head_linear(mixed, self.values).flatten(1), self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
    """What distinguishes the latent attention of one family from another's. Its tensors are `self_attn.*`."""

    ops: ClassVar[tuple[str, ...]] = ("mla",)

    d_model: int
    n_heads: int
    d_query_latent: int | None  # None: queries are made of the row itself
    d_latent: int
    d_plain: int  # of a query or key, without the part that is rotated
    d_rope: int
    d_value: int
    rope: RopeSpec | None  # None: nothing is rotated
    interleaved: bool
    norm: NormSpec  # of latents
    scale: float  # of the scores
    bias: bool = False  # of what makes latents, and of the output

    def split(self, n: int) -> LatentAttentionSpec:
        """What each of n ranks computes: some heads, over latents that all have. Raises `SettingError`."""
        return replace(self, n_heads=share(self.n_heads, "attention heads", n))

    @property
    def need(self) -> Latent:
        """What the layer needs from a `Store`."""
        return Latent(self.d_latent, self.d_rope)

    def load(self, weights: TensorSource, block: str, ropes: Ropes) -> LatentAttention:
        """The attention of the block whose tensors start with `block`."""
        name, d_q = f"{block}.self_attn", self.n_heads * (self.d_plain + self.d_rope)
        d_latents = self.d_latent + self.d_rope
        keys, values = self._load_heads(weights, f"{name}.kv_b_proj")
        compress, query_norm, source, width = None, None, "q_proj", self.d_model
        if self.d_query_latent is not None:
            source, width = "q_b_proj", self.d_query_latent
            compress = load_linear(weights, [f"{name}.q_a_proj"], self.d_model, [width], bias=self.bias)
            query_norm = load_norm(weights, f"{name}.q_a_layernorm", width, self.norm)
        return LatentAttention(
            spec=self,
            need=self.need,
            compress=compress,
            query_norm=query_norm,
            queries=load_linear(weights, [f"{name}.{source}"], width, [d_q], bias=False),
            latents=load_linear(
                weights, [f"{name}.kv_a_proj_with_mqa"], self.d_model, [d_latents], bias=self.bias
            ),
            norm=LatentNorm(
                load_scale(weights, f"{name}.kv_a_layernorm", self.d_latent, self.norm), self.norm.eps
            ),
            rope=LatentRope(None if self.rope is None else ropes[self.rope], self.interleaved),
            keys=keys,
            values=values,
            out=load_linear(
                weights, [f"{name}.o_proj"], self.n_heads * self.d_value, [self.d_model], bias=self.bias
            ),
        )

    def _load_heads(self, weights: TensorSource, name: str) -> tuple[PackedHeads, PackedHeads]:
        """Each head's matrices of keys and of values, whose rows alternate head by head.

        The first is multiplied from the other side, so neither is kept in few bits.
        """
        d_out = self.d_plain + self.d_value
        both = widened(weights.take_linear([name], self.d_latent, [self.n_heads * d_out]))
        by_head = both.view(self.n_heads, d_out, self.d_latent)
        keys = by_head[:, : self.d_plain].transpose(1, 2).contiguous()  # [n_heads, d_latent, d_plain]
        values = by_head[:, self.d_plain :].contiguous()  # [n_heads, d_value, d_latent]
        return pack_heads(keys), pack_heads(values)
