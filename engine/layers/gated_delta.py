"""A gated-delta layer: projections, short convolution, the delta rule on a state per slot, gated norm, projection.

Source: Gated DeltaNet (Yang, Kautz, Hatamizadeh, arXiv 2412.06464) as Qwen3-Next and Qwen3.5 use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.recurrent import Recurrent, RecurrentLayer
from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.attention import Ropes
from slipstream.engine.layers.linear import load_linear
from slipstream.engine.ranks import Joint
from slipstream.kernels.gated_delta.op import DeltaGate, gated_delta
from slipstream.kernels.gated_norm.op import gated_norm
from slipstream.kernels.matmul.op import Packed, linear, pack
from slipstream.kernels.short_conv.op import short_conv


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """One layer."""

    need: Recurrent
    qkvz: Packed  # all queries, keys and values, which are mixed over time; then the output's gate
    ba: Packed  # per value head: what beta and the decay are made of
    conv: Tensor  # [n_channels, width], its transpose contiguous
    gate: DeltaGate
    norm: Tensor  # [d_value]
    eps: float
    out: Packed

    def __call__(self, x: Tensor, batch: Batch, layer: RecurrentLayer) -> Tensor:
        """x: [n_tokens, d_model]. Returns x's shape. The slots' states take the certain rows in, drafts are parked."""
        rows = batch.recurrent
        assert rows is not None  # a store with recurrent layers makes it
        n_heads, n_channels = self.need.n_value_heads, self.need.n_channels
        qkvz = linear(x, self.qkvz)  # [n_tokens, n_channels + n_value_heads * d_value]
        ba = linear(x, self.ba)  # [n_tokens, 2 * n_value_heads]
        mixed = short_conv(qkvz[:, :n_channels], self.conv, layer.conv, rows)  # [n_tokens, n_channels]
        # Shape of `said`: [n_tokens, n_value_heads, d_value].
        said = gated_delta(mixed, ba[:, n_heads:], ba[:, :n_heads], self.gate, layer.delta, rows)
        normed = gated_norm(said, qkvz[:, n_channels:], self.norm, self.eps, "silu")
        return linear(normed, self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """What distinguishes the gated-delta layer of one family from another's. Its tensors are `linear_attn.*`."""

    d_model: int
    need: Recurrent
    eps: float
    grouped: bool = False  # projections are stored joined, key head by key head (Qwen3-Next)

    rope = None
    ops: ClassVar[tuple[str, ...]] = ("gated_delta", "short_conv", "gated_norm")

    def split(self, n: int) -> GatedDeltaSpec:
        """What each of n ranks computes. Raises `SettingError`."""
        return replace(self, need=self.need.split(n))

    def load(self, weights: TensorSource, block: str, ropes: Ropes) -> GatedDelta:
        """The layer of the block whose tensors start with `block`."""
        name, need = f"{block}.linear_attn", self.need
        n_heads, wide = need.n_value_heads, torch.promote_types(weights.dtype, torch.float32)
        grouped = self.grouped and f"{name}.in_proj_qkvz.weight" in weights  # GGUF files have them apart
        qkvz, ba = (self._ungrouped if grouped else self._joined)(weights, name)
        joint = Joint(0, need.channels)
        conv = weights.take(f"{name}.conv1d.weight", [need.n_channels, 1, need.conv_width], joint=joint)[:, 0]
        return GatedDelta(
            need=need,
            qkvz=qkvz,
            ba=ba,
            conv=conv.t().contiguous().t(),
            gate=DeltaGate(
                a_log=weights.take(f"{name}.A_log", [n_heads], wide),
                dt_bias=weights.take(f"{name}.dt_bias", [n_heads], wide),
            ),
            norm=weights.take(f"{name}.norm.weight", [need.d_value]),
            eps=self.eps,
            out=load_linear(
                weights, [f"{name}.out_proj"], n_heads * need.d_value, [self.d_model], bias=False
            ),
        )

    def _joined(self, weights: TensorSource, name: str) -> tuple[Packed, Packed]:
        """(qkvz, ba) of projections that are stored one by one."""
        need, n_heads = self.need, self.need.n_value_heads

        def joined(parts: tuple[str, str], widths: list[int], joint: Sequence[int] = ()) -> Packed:
            names = [f"{name}.in_proj_{one}" for one in parts]
            return load_linear(weights, names, self.d_model, widths, bias=False, joint=joint)

        qkvz = joined(("qkv", "z"), [need.n_channels, n_heads * need.d_value], need.channels)
        return qkvz, joined(("b", "a"), [n_heads, n_heads])

    def _ungrouped(self, weights: TensorSource, name: str) -> tuple[Packed, Packed]:
        """The same of rows that lie together by key head: query, key, its values, their gates; its betas, decays."""
        need = self.need
        n_groups, d_key = need.n_key_heads, need.d_key
        d_values = need.n_value_heads // n_groups * need.d_value
        sizes = [d_key, d_key, d_values, d_values]
        qkvz = weights.take(f"{name}.in_proj_qkvz.weight", [n_groups * sum(sizes), self.d_model])
        ba = weights.take(f"{name}.in_proj_ba.weight", [2 * need.n_value_heads, self.d_model])

        def ungrouped(matrix: Tensor, sizes: list[int]) -> Packed:
            grouped = matrix.view(n_groups, -1, self.d_model)
            parts = torch.split(grouped, sizes, 1)  # [n_groups, size, d_model] each
            return pack(torch.cat([part.flatten(0, 1) for part in parts]))

        return ungrouped(qkvz, sizes), ungrouped(ba, [need.n_value_heads // n_groups] * 2)
