"""RMS normalisation of every head of a row, then a gate: what follows a recurrent layer's output."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from slipstream.kernels.dispatch import op

Activation = Literal["silu", "sigmoid"]


@op("triton", "cpu", "reference")
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight * activation(gate) per head, in float32, rounded once.

    x: [n_rows, n_heads, d]. gate: [n_rows, n_heads * d], x's dtype; rows may be a slice of wider ones.
    weight: [d], x's dtype or float32. Returns [n_rows, n_heads * d], gate's dtype. "silu" is Gated DeltaNet's,
    "sigmoid" Kimi Delta Attention's. (Hugging Face transformers rounds the normed heads to x's dtype before the
    product with the weight for Qwen, and only once, as here, for Kimi; in float32 the two are the same.)
    """
    raise NotImplementedError
