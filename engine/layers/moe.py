"""The feed-forward block of a mixture of experts: a router, the few experts it names for a row, a shared expert.

Each row costs the experts it asks for, so in a pass of few rows every further row reads more weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.mlp import GatedMLP, MLPSpec
from slipstream.engine.ranks import Joint, share
from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.gated.op import sigmoid_mul
from slipstream.kernels.matmul.op import Packed, linear, pack
from slipstream.kernels.matmul.quantized import Quantized, joined, widened
from slipstream.kernels.moe.op import (
    ExpertMatrices,
    NarrowMatrices,
    PackedExperts,
    Routing,
    experts,
    pack_experts,
    route,
)

# What a checkpoint calls the matrices of one expert: gate, up, down.
PLAIN = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")
CHOICE_BIAS = "gate.e_score_correction_bias"  # what most checkpoints call the bias for the choice


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """An expert that every row sees."""

    name: str  # of its tensors, below the block's
    d_ffn: int
    gated: bool = False  # its output is multiplied by the sigmoid of one more product of the row
    activation: Activation = SILU


def load_experts(weights: TensorSource, name: str, spec: MoESpec) -> PackedExperts:
    """The experts whose tensors start with `name`: all in two tensors or in three, or three matrices each."""
    n, d_model, d_ffn = spec.n_experts, spec.d_model, spec.d_ffn
    if f"{name}.gate_up_proj" in weights:
        return pack_experts(
            weights.take(f"{name}.gate_up_proj", [n, 2 * d_ffn, d_model], joint=Joint(1, (d_ffn, d_ffn))),
            weights.take(f"{name}.down_proj", [n, d_model, d_ffn]),
            activation=spec.activation,
        )
    if f"{name}.gate_proj.weight" in weights:
        halves = [weights.take(f"{name}.{part}.weight", [n, d_ffn, d_model]) for part in PLAIN[:2]]
        stacked = torch.cat(halves, 1)  # [n_experts, 2 * d_ffn, d_model]
        halves.clear()  # or memory would hold gates and ups twice until all is packed
        down_proj = weights.take(f"{name}.down_proj.weight", [n, d_model, d_ffn])
        return pack_experts(stacked, down_proj, activation=spec.activation)
    gate, up, down = MIXTRAL if f"{name}.0.{MIXTRAL[0]}.weight" in weights else PLAIN
    inner = [[f"{name}.{i}.{gate}", f"{name}.{i}.{up}"] for i in range(n)]
    outer = [[f"{name}.{i}.{down}"] for i in range(n)]
    return pack_experts(
        load_stack(weights, inner, (d_ffn, d_model)),
        load_stack(weights, outer, (d_model, d_ffn)),
        activation=spec.activation,
    )


def load_stack(
    weights: TensorSource, names: Sequence[Sequence[str]], shape: tuple[int, int]
) -> ExpertMatrices:
    """A matrix for each expert, made of its matrices `name.weight` of that shape, one below the other.

    They are narrow if all experts' are, else wide.
    """
    wide: Tensor | None = None
    narrow: list[Quantized] = []
    for i, own in enumerate(names):
        matrix = joined([weights.take_expert(f"{one}.weight", shape) for one in own])
        if wide is None and not isinstance(matrix, Tensor):
            narrow.append(matrix)
            continue
        dense = widened(matrix)
        if wide is None:  # not before: a config that is wrong may ask for more room than there is
            wide = dense.new_empty((len(names), *dense.shape))
            for j, one in enumerate(narrow):
                wide[j] = widened(one)
        wide[i] = dense
    return NarrowMatrices(narrow) if wide is None else wide


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """What distinguishes one mixture of experts from another."""

    ops: ClassVar[tuple[str, ...]] = ("moe", "gated")
    adds_itself: ClassVar[bool] = False

    d_model: int
    d_ffn: int  # of one expert
    n_experts: int
    routing: Routing
    router: str = "gate"  # its tensors' name, below the layer's
    router_bias: bool = False
    choice_bias: str | None = None  # the same of a bias for the choice alone; None: there is none
    experts: str = "experts"  # the same of the experts
    wide_router: bool = False  # the router multiplies in float32 whatever the dtype of the rest
    shared: SharedSpec | None = None
    activation: Activation = SILU  # of an expert
    load_experts: Callable[[TensorSource, str, MoESpec], PackedExperts] = load_experts

    def split(self, n: int) -> MoESpec:
        """What each of n ranks computes: a part of every expert, so that all have as much to do.

        Raises `SettingError`.
        """
        shared = self.shared
        if shared is not None:
            shared = replace(shared, d_ffn=share(shared.d_ffn, "inner features of a shared expert", n))
        return replace(self, d_ffn=share(self.d_ffn, "inner features of an expert", n), shared=shared)

    def load(self, weights: TensorSource, name: str) -> MoE:
        """The layer whose tensors start with `name`.

        With a wide router, `kernels.select` must have run for float32 too. Raises `LoadError` naming a tensor
        of another shape.
        """
        dtype = torch.promote_types(weights.dtype, torch.float32) if self.wide_router else weights.dtype
        routing = self.routing
        if self.choice_bias is not None:
            bias = weights.take(f"{name}.{self.choice_bias}", [self.n_experts], torch.float32)  # [n_experts]
            routing = replace(routing, bias=bias)
        shared, shared_gate = None, None
        if self.shared is not None:
            spec = MLPSpec(self.d_model, self.shared.d_ffn, activation=self.shared.activation)
            shared = spec.load(weights, f"{name}.{self.shared.name}")
            if self.shared.gated:
                shared_gate = pack(weights.take(f"{name}.{self.shared.name}_gate.weight", [1, self.d_model]))
        return MoE(
            spec=self,
            router=self._load_router(weights, f"{name}.{self.router}", dtype),
            router_dtype=dtype,
            routing=routing,
            experts=self.load_experts(weights, f"{name}.{self.experts}", self),
            shared=shared,
            shared_gate=shared_gate,
        )

    def _load_router(self, weights: TensorSource, name: str, dtype: torch.dtype) -> Packed:
        bias = weights.take(f"{name}.bias", [self.n_experts], dtype) if self.router_bias else None
        return pack(weights.take(f"{name}.weight", [self.n_experts, self.d_model], dtype), bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """One mixture of experts."""

    spec: MoESpec
    router: Packed  # [n_experts, d_model]
    router_dtype: torch.dtype
    routing: Routing
    experts: PackedExperts
    shared: GatedMLP | None
    shared_gate: Packed | None  # [1, d_model]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_rows, d_model]. Returns the same shape."""
        logits = linear(x.to(self.router_dtype), self.router)  # [n_rows, n_experts]
        said = experts(x, route(logits, self.routing), self.experts)  # [n_rows, d_model]
        if self.shared is None:
            return said
        shared = self.shared(x)  # [n_rows, d_model]
        if self.shared_gate is not None:
            shared = sigmoid_mul(shared, linear(x, self.shared_gate))
        return said + shared
