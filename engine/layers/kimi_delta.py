"""Kimi Delta Attention: the gated delta rule where every key dimension decays on its own (arXiv 2510.26692).

Decay and output gate are products of two thin matrices; queries, keys and values have a short convolution each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.recurrent import Recurrent, RecurrentLayer
from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.attention import Ropes
from slipstream.engine.layers.linear import load_linear
from slipstream.kernels.gated_delta.op import DeltaGate, gated_delta
from slipstream.kernels.gated_norm.op import gated_norm
from slipstream.kernels.matmul.op import Packed, linear
from slipstream.kernels.short_conv.op import short_conv


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta:
    """One layer."""

    need: Recurrent
    qkv: Packed
    thin: Packed  # [2 * d_thin + n_heads, d_model]: what decay, output gate and beta are made of
    decay: Packed  # [n_heads * d_key, d_thin]
    out_gate: Packed  # [n_heads * d_value, d_thin]
    conv: Tensor  # [n_channels, width], its transpose contiguous
    gate: DeltaGate
    norm: Tensor  # [d_value]
    eps: float
    out: Packed

    def __call__(self, x: Tensor, batch: Batch, layer: RecurrentLayer) -> Tensor:
        """x: [n_tokens, d_model]. Returns x's shape. The slots' states take the certain rows in, drafts are parked."""
        rows, need = batch.recurrent, self.need
        assert rows is not None  # a store with recurrent layers makes it
        mixed = short_conv(linear(x, self.qkv), self.conv, layer.conv, rows)  # [n_tokens, n_channels]
        thin = linear(x, self.thin)  # [n_tokens, 2 * d_thin + n_heads]
        of_decay, of_gate = thin[:, : -need.n_value_heads].chunk(2, -1)  # [n_tokens, d_thin] each
        raw_decay = linear(of_decay.contiguous(), self.decay).view(-1, need.n_value_heads, need.d_key)
        raw_beta = thin[:, -need.n_value_heads :]  # [n_tokens, n_heads]
        # Shape of `said`: [n_tokens, n_heads, d_value].
        said = gated_delta(mixed, raw_decay, raw_beta, self.gate, layer.delta, rows)
        out_gate = linear(of_gate.contiguous(), self.out_gate)  # [n_tokens, n_heads * d_value]
        return linear(gated_norm(said, out_gate, self.norm, self.eps, "sigmoid"), self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec:
    """The shape of such a layer. Its tensors are `self_attn.*`."""

    d_model: int
    need: Recurrent  # heads of keys and of values are as many, and as wide
    eps: float

    rope = None
    ops: ClassVar[tuple[str, ...]] = ("gated_delta", "short_conv", "gated_norm")

    def split(self, n: int) -> KimiDeltaSpec:
        """What each of n ranks computes. Raises `SettingError`."""
        return replace(self, need=self.need.split(n))

    def load(self, weights: TensorSource, block: str, ropes: Ropes) -> KimiDelta:
        """The layer of the block whose tensors start with `block`."""
        name, need = f"{block}.self_attn", self.need
        n_heads, d_head = need.n_value_heads, need.d_key
        d, wide = n_heads * d_head, torch.promote_types(weights.dtype, torch.float32)

        def joined(parts: list[str], d_in: int, widths: list[int]) -> Packed:
            return load_linear(weights, [f"{name}.{one}" for one in parts], d_in, widths, bias=False)

        convs = [
            weights.take(f"{name}.{one}_conv1d.weight", [d, 1, need.conv_width]) for one in ("q", "k", "v")
        ]
        return KimiDelta(
            need=need,
            qkv=joined(["q_proj", "k_proj", "v_proj"], self.d_model, [d, d, d]),
            thin=joined(["f_a_proj", "g_a_proj", "b_proj"], self.d_model, [d_head, d_head, n_heads]),
            decay=joined(["f_b_proj"], d_head, [d]),
            out_gate=joined(["g_b_proj"], d_head, [d]),
            conv=torch.cat(convs)[:, 0].t().contiguous().t(),
            gate=DeltaGate(
                a_log=weights.take(f"{name}.A_log", [1, 1, n_heads, 1], wide).flatten(),
                dt_bias=weights.take(f"{name}.dt_bias", [d], wide).view(n_heads, d_head),
            ),
            norm=weights.take(f"{name}.o_norm.weight", [d_head]),
            eps=self.eps,
            out=joined(["o_proj"], d, [self.d_model]),
        )
