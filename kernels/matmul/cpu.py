"""Linear layers on CPU through oneDNN with prepacked weights, bit-identical for any number of rows.

oneDNN sums an inner dimension of at most 1024 in one order, whatever the number of rows; longer ones it may split
differently. So the inner dimension is cut into fixed chunks and the partial results are added in order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.matmul.packed import Packed

CHUNK = 1024


@dataclass(frozen=True, slots=True)
class ChunkedWeight:
    """The weight in oneDNN's own layout, one matrix per chunk of the inner dimension."""

    chunks: tuple[Tensor, ...]  # each [out_features, at most CHUNK], opaque layout
    bias: Tensor | None  # [out_features]
    in_features: int
    out_features: int


@functools.cache
def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16):
        return "float32 and bfloat16 only"
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    try:
        probe = pack(torch.eye(16, dtype=dtype))
        exact = torch.equal(linear(torch.eye(16, dtype=dtype), probe), torch.eye(16, dtype=dtype))
    except (AttributeError, RuntimeError) as error:
        return f"oneDNN does not prepack here: {error}"
    return None if exact else "oneDNN's product is wrong here"


def pack(weight: Tensor, bias: Tensor | None = None) -> Packed:
    out_features, in_features = weight.shape
    chunks = tuple(
        torch.ops.mkldnn._reorder_linear_weight(weight[:, start : start + CHUNK].contiguous())
        for start in range(0, in_features, CHUNK)
    )
    return ChunkedWeight(chunks, bias, in_features, out_features)


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    if not isinstance(packed, ChunkedWeight):
        raise TypeError(f"cpu linear got a {type(packed).__name__}; pack the weight with cpu too")
    product = torch.ops.mkldnn._linear_pointwise
    if len(packed.chunks) == 1:
        out: Tensor = product(x, packed.chunks[0], packed.bias, "none", [], "")
        return out if out_dtype is None else out.to(out_dtype)
    # Partial sums are added in float32: rounding each addition to bfloat16 would cost accuracy.
    total = product(x[:, :CHUNK], packed.chunks[0], packed.bias, "none", [], "").to(torch.float32)
    for i, chunk in enumerate(packed.chunks[1:], start=1):
        total += product(x[:, i * CHUNK : (i + 1) * CHUNK], chunk, None, "none", [], "")
    return total.to(out_dtype or x.dtype)
