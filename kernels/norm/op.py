"""RMS normalisation of rows, alone and fused with the residual addition before it."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import op


@op("cpu", "reference")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * round(x / sqrt(mean(x²) + eps)), the mean in float32, rounded to x's dtype before the product.

    x: [n_rows, d_model]. weight: [d_model], x's dtype. Returns [n_rows, d_model], x's dtype.
    The order of rounding is that of Llama and Qwen in Hugging Face transformers.
    """
    raise NotImplementedError


@op("cpu", "reference")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum), sum) with sum = x + residual rounded to their dtype.

    x, residual: [n_rows, d_model]. weight: [d_model]. Returns two new [n_rows, d_model]; changes nothing in place.
    """
    raise NotImplementedError
