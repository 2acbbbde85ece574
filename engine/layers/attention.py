"""Grouped-query attention over the paged cache: one product for q, k and v, norms, rotation, page write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.kv import KV, KVLayer
from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.layers.linear import load_linear
from slipstream.engine.layers.norm import NormSpec, load_scale
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.ranks import share, share_or_repeat
from slipstream.kernels.attention.op import WIDEST_ON_CUDA, attention
from slipstream.kernels.gated.op import sigmoid_mul
from slipstream.kernels.matmul.op import Packed, linear, pack
from slipstream.kernels.matmul.quantized import widened
from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope_write

Ropes = Mapping[RopeSpec, Rope]  # tables, made once for all layers that share them


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer."""

    qkv: Packed
    out: Packed
    norms: HeadNorms | None
    rope: Rope
    scale: float
    need: KV
    gate: Packed | None = None  # of the output, before `out`: an output per element, or per head
    sinks: Tensor | None = None  # [n_heads] float32
    value_scale: float | None = None

    def __call__(self, x: Tensor, batch: Batch, layer: KVLayer) -> Tensor:
        """x: [n_tokens, d_model]. Writes the rows into the layer's keys and values. Returns x's shape."""
        keys, values, window = layer.keys, layer.values, self.need.window
        batch = pages_of(batch, window)
        rope = batch.rope or self.rope
        q = norm_rope_write(linear(x, self.qkv), self.norms, rope, batch, keys, values)
        if (factors := rope.query_factors) is not None:
            q = q * factors[batch.positions].to(q.dtype)[:, None, None]
        mixed = attention(  # [n_tokens, n_heads * d_value]
            q, keys, values, batch, self.scale, window, self.sinks
        )
        if self.value_scale is not None:
            mixed = mixed * self.value_scale  # linear in the values, so once here is as good as on each
        if self.gate is not None:
            mixed = opened(mixed, linear(x, self.gate), values.shape[-1])
        return linear(mixed, self.out)


def opened(mixed: Tensor, gate: Tensor, d_head: int) -> Tensor:
    """mixed * sigmoid(gate), [n_tokens, n_heads * d_head]. gate: mixed's shape, or [n_tokens, n_heads]: one a head."""
    if gate.shape == mixed.shape:
        return sigmoid_mul(mixed, gate)
    heads = sigmoid_mul(mixed.reshape(-1, d_head), gate.reshape(-1, 1))  # [n_tokens * n_heads, d_head]
    return heads.view(mixed.shape)


def pages_of(batch: Batch, window: int | None) -> Batch:
    """The batch with the pages of layers with a window, if there is one."""
    if window is None:
        return batch
    assert batch.window is not None  # the store that has such layers has their pages
    return batch.window


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What distinguishes the attention of one family from another's. Its tensors are `self_attn.*`."""

    ops: ClassVar[tuple[str, ...]] = ("attention", "norm_rope_write", "gated")

    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    rope: RopeSpec
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: NormSpec | None = None  # None: queries and keys are not normalised per head
    # Of the output: a number per element, for which q_proj holds each head's query and its gate; a number per head, of
    # `g_proj`; None: no gate.
    gate: Literal["element", "head"] | None = None
    scale: float | None = None  # of the scores; None: d_head ** -0.5
    window: int | None = None  # positions a row sees, its own included; None: all before it
    sinks: str | None = None  # tensor with a score per query head that joins the softmax and brings no value
    d_in: int | None = None  # width of the rows it reads, where that is not d_model
    norms_values: bool = False  # values are normalised too, without a scale; with head_norm only
    keys_as_values: bool = False  # there is no v_proj: values are what k_proj gives, before norm and rotation
    # Of a value head; None: d_head, as a gate per element and `keys_as_values` have it.
    d_value: int | None = None
    value_scale: float | None = None  # values count that much; None: as they are

    def __post_init__(self) -> None:
        d_head, d_value = self.need.widths
        if d_value != d_head and (self.gate == "element" or self.keys_as_values):
            raise ValueError("gates of elements and values that are keys are as wide as keys")

    def split(self, n: int) -> AttentionSpec:
        """What each of n ranks computes; a head of keys may be on several. Raises `SettingError`."""
        n_heads = share(self.n_heads, "attention heads", n)
        return replace(self, n_heads=n_heads, n_kv_heads=share_or_repeat(self.n_kv_heads, "key heads", n))

    @property
    def need(self) -> KV:
        """What the layer needs from a `Store`."""
        return KV(self.n_kv_heads, self.d_head, self.window, d_value=self.d_value)

    @property
    def score_scale(self) -> float:
        """By what scores are multiplied."""
        return self.d_head**-0.5 if self.scale is None else self.scale

    def load(self, weights: TensorSource, block: str, ropes: Ropes) -> Attention:
        """The attention of the block whose tensors start with `block`."""
        name = f"{block}.self_attn"
        _, d_value = self.need.widths
        if self.d_head % 2 or d_value % 2:
            raise UnsupportedModel(f"{name}: head_dim = {self.d_head}, v_head_dim = {d_value}: must be even")
        if weights.device.type == "cuda" and self.d_head > WIDEST_ON_CUDA:
            raise UnsupportedModel(
                f"{name}: heads of {self.d_head} values: attention on CUDA has at most {WIDEST_ON_CUDA};"
                " --device cpu runs them"
            )
        norms = None
        if self.head_norm is not None:
            q, k = (
                load_scale(weights, f"{name}.{part}_norm", self.d_head, self.head_norm) for part in ("q", "k")
            )
            norms = HeadNorms(q=q, k=k, eps=self.head_norm.eps, values=self.norms_values)
        qkv, gate = self._projections(weights, name)
        return Attention(
            qkv=qkv,
            out=load_linear(
                weights, [f"{name}.o_proj"], self.n_heads * d_value, [self.d_model], bias=self.out_bias
            ),
            norms=norms,
            rope=ropes[self.rope],
            scale=self.score_scale,
            need=self.need,
            gate=gate,
            sinks=self._load_sinks(weights, name),
            value_scale=self.value_scale,
        )

    def _projections(self, weights: TensorSource, name: str) -> tuple[Packed, Packed | None]:
        """The joined projections, and that of the output's gate, if there is one."""
        d_head, d_value = self.need.widths
        d_q, d_k, d_v = self.n_heads * d_head, self.n_kv_heads * d_head, self.n_kv_heads * d_value
        d_in = self.d_model if self.d_in is None else self.d_in
        inputs = [f"{name}.{part}_proj" for part in ("q", "k", "v")]
        if self.gate == "element":
            return self._split(weights, inputs)
        gate = None
        if self.gate == "head":
            gate = load_linear(weights, [f"{name}.g_proj"], d_in, [self.n_heads], bias=False)
        if self.keys_as_values:
            both = widened(weights.take_linear(inputs[:2], self.d_model, [d_q, d_k]))
            return pack(torch.cat((both, both[d_q:]))), gate  # [d_q + 2 * d_k, d_model]
        return load_linear(weights, inputs, d_in, [d_q, d_k, d_v], bias=self.qkv_bias), gate

    def _load_sinks(self, weights: TensorSource, name: str) -> Tensor | None:  # [n_heads] float32
        if self.sinks is None:
            return None
        return weights.take(f"{name}.{self.sinks}", [self.n_heads], torch.float32)

    def _split(self, weights: TensorSource, inputs: list[str]) -> tuple[Packed, Packed]:
        """The joined projections and the gate's, whose rows alternate with the query's head by head."""
        d_q, d_kv = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        both = weights.take(f"{inputs[0]}.weight", [2 * d_q, self.d_model])
        # [n_heads, d_head, d_model] each
        q, gate = both.view(self.n_heads, 2, self.d_head, self.d_model).unbind(1)
        k, v = (weights.take(f"{one}.weight", [d_kv, self.d_model]) for one in inputs[1:])
        qkv = torch.cat((q.flatten(0, 1), k, v))  # [d_q + 2 * d_kv, d_model]
        bias, gate_bias = None, None
        if self.qkv_bias:
            q_bias = weights.take(f"{inputs[0]}.bias", [2 * d_q]).view(self.n_heads, 2, self.d_head)
            k_bias, v_bias = (weights.take(f"{one}.bias", [d_kv]) for one in inputs[1:])
            bias = torch.cat((q_bias[:, 0].flatten(), k_bias, v_bias))  # [d_q + 2 * d_kv]
            gate_bias = q_bias[:, 1].flatten()  # [d_q]
        return pack(qkv, bias), pack(gate.flatten(0, 1).contiguous(), gate_bias)
