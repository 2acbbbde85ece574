"""RMS normalisation with its learnt scale, alone and joined with the residual addition before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.kernels.norm.op import add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class NormSpec:
    """What distinguishes the norms of one family from another's."""

    eps: float
    one_plus: bool = False  # the stored scale is what is added to 1, and multiplied before rounding
    wide: bool = False  # the stored scale too is multiplied before rounding


@dataclass(frozen=True, slots=True)
class Norm:
    """weight * x / rms(x)."""

    weight: Tensor  # [d_model]; in float32 beside narrower rows it is multiplied before they are rounded
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_rows, d_model]. Returns the same shape."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum), each [n_rows, d_model]."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class SumAlone:
    """In the place of a norm, before a half that norms its input itself."""

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The sum twice, each [n_rows, d_model]."""
        total = residual + x  # [n_rows, d_model]
        return total, total


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a block calls its norms: those before its two halves, and those of what the halves add, if there are any."""

    before_mixer: str = "input_layernorm"
    before_ffn: str | None = "post_attention_layernorm"  # None: the half norms its input itself
    after_mixer: str | None = None
    after_ffn: str | None = None


SANDWICH_NORMS = NormNames(  # of Gemma since the second
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_ffn="pre_feedforward_layernorm",
    after_ffn="post_feedforward_layernorm",
)


def load_scale(weights: TensorSource, name: str, width: int, spec: NormSpec) -> Tensor:
    """The scale `name.weight` as the ops take it, [width]."""
    weight = weights.take(f"{name}.weight", [width])
    if spec.one_plus or spec.wide:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return 1.0 + weight if spec.one_plus else weight


def load_norm(weights: TensorSource, name: str, d_model: int, spec: NormSpec) -> Norm:
    """The norm whose scale is the tensor `name.weight`."""
    return Norm(load_scale(weights, name, d_model, spec), spec.eps)
