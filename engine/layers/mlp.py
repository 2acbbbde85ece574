"""The gated feed-forward block: down(act(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.linear import load_linear
from slipstream.engine.ranks import share
from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.gated.op import gated_mul
from slipstream.kernels.matmul.op import Packed, linear


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """One feed-forward layer."""

    gate_up: Packed
    down: Packed
    activation: Activation = SILU

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_rows, d_model]. Returns the same shape."""
        return linear(gated_mul(linear(x, self.gate_up), self.activation), self.down)


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """The shape of a feed-forward layer."""

    ops: ClassVar[tuple[str, ...]] = ("gated",)
    adds_itself: ClassVar[bool] = False

    d_model: int
    d_ffn: int
    bias: bool = False
    activation: Activation = SILU

    def split(self, n: int) -> MLPSpec:
        """What each of n ranks computes. Raises `SettingError`."""
        return replace(self, d_ffn=share(self.d_ffn, "inner features of a feed-forward layer", n))

    def load(self, weights: TensorSource, name: str) -> GatedMLP:
        """The layer whose tensors start with `name`."""
        inputs = [f"{name}.gate_proj", f"{name}.up_proj"]
        return GatedMLP(
            gate_up=load_linear(weights, inputs, self.d_model, [self.d_ffn, self.d_ffn], bias=self.bias),
            down=load_linear(weights, [f"{name}.down_proj"], self.d_ffn, [self.d_model], bias=self.bias),
            activation=self.activation,
        )
