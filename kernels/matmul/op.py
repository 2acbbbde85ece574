"""Linear layers. A weight is packed once at load; `linear` then multiplies rows by it.

A row's result does not depend on how many rows are computed with it, nor on the number of threads, except in
the `reference` implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.dispatch import op
from slipstream.kernels.matmul.packed import Packed as Packed
from slipstream.kernels.matmul.quantized import Quantized as Quantized


@op("cuda", "triton", "panels", "cpu", "tiled", "reference")
def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    """Lay a weight out for `linear`.

    weight: [out_features, in_features]; of one of few bits the values are those of its `dense()`, whether they are
    widened here, as on CPUs, or while they are multiplied. bias: [out_features] or None.
    Keeps no reference to `weight` where the layout is a copy: drop yours, or memory holds both.
    """
    raise NotImplementedError


@op("cuda", "triton", "panels", "cpu", "tiled", "reference")
def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight.T + bias.

    x: [n_rows, in_features], dtype of the weight. Returns [n_rows, out_features] in `out_dtype`, by default x's.
    Raises TypeError if `packed` comes from another implementation.
    """
    raise NotImplementedError
