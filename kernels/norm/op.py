"""RMS normalisation of rows, alone and fused with the residual addition before it."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.dispatch import op


@op("triton", "cpu", "reference")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x²) + eps), float32 inside; the weight's dtype says where it is rounded.

    x: [n_rows, d_model]. weight: [d_model], x's dtype or float32. Returns [n_rows, d_model], x's dtype.
    A weight in x's dtype multiplies the quotient rounded to it, the order of Llama and Qwen3 in Hugging Face
    transformers. A float32 weight beside narrower rows multiplies before the only rounding: the "one-plus" norms of
    Gemma 3 and Qwen3-Next, whose loaders pass 1 + w. For float32 rows the two are the same.
    """
    raise NotImplementedError


@op("triton", "cpu", "reference")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum), sum) with sum = x + residual rounded to their dtype.

    x, residual: [n_rows, d_model]. weight: as in `rms_norm`.
    Returns two new [n_rows, d_model]; changes nothing in place.
    """
    raise NotImplementedError
