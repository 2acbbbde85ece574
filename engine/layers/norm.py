"""RMS normalisation with its learnt scale, alone and joined with the residual addition before it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.weights import Weights
from kernels.norm.op import add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class Norm:
    """weight * x / rms(x)."""

    weight: Tensor  # [d_model]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_rows, d_model]. Returns the same shape."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum), each [n_rows, d_model]."""
        return add_rms_norm(x, residual, self.weight, self.eps)


def load_norm(weights: Weights, name: str, d_model: int, eps: float) -> Norm:
    """The norm whose scale is the tensor `name.weight`."""
    return Norm(weights.take(f"{name}.weight", [d_model]), eps)
