"""Linear layers on CPUs that panels do not serve, bit-identical for any number of rows: oneDNN, prepacked weights.

oneDNN sums an inner dimension of at most 1024 in one order, whatever the number of rows; longer ones it may split
differently. So the inner dimension is cut into fixed chunks and the partial results are added in order.

Where it has no products in bfloat16 the weight is kept in float32, twice as large, and the result is rounded once:
torch's own bfloat16 takes ten times as long there. The same on CPUs with AMX, whose tiles sum a row in another order
than the products of few rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.matmul.packed import Packed
from slipstream.kernels.matmul.quantized import Quantized, widened
from slipstream.kernels.matmul.reference import take_rows as take_rows

CHUNK = 1024


@dataclass(frozen=True, slots=True)
class ChunkedWeight:
    """The weight in oneDNN's own layout, one matrix per chunk of the inner dimension."""

    chunks: tuple[Tensor, ...]  # each [out_features, at most CHUNK], opaque layout
    bias: Tensor | None  # [out_features], the chunks' dtype
    in_features: int
    out_features: int


@functools.cache
def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16):
        return "float32 and bfloat16 only"
    try:
        exact = _probe(dtype)
    except (AttributeError, RuntimeError) as error:
        return f"oneDNN does not prepack here: {error}"
    return None if exact else "oneDNN's sums depend on the number of rows here"


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    weight = widened(weight)
    dtype = _computed_in(weight.dtype)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    out_features, in_features = weight.shape
    reorder = torch.ops.mkldnn._reorder_linear_weight.default
    starts = range(0, in_features, CHUNK)
    chunks = tuple(reorder(weight[:, start : start + CHUNK].contiguous()) for start in starts)
    return ChunkedWeight(chunks, bias, in_features, out_features)


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    if not isinstance(packed, ChunkedWeight):
        raise TypeError(f"cpu linear got a {type(packed).__name__}; pack the weight with cpu too")
    product, dtype = torch.ops.mkldnn._linear_pointwise.default, out_dtype or x.dtype
    x = x.to(packed.chunks[0].dtype)
    if len(packed.chunks) == 1:
        only: Tensor = product(x, packed.chunks[0], packed.bias, "none", [], "")
        return only.to(dtype)
    # Partial sums are added in float32: rounding every addition to bfloat16 would cost accuracy.
    total: Tensor = product(x[:, :CHUNK], packed.chunks[0], packed.bias, "none", [], "").to(torch.float32)
    for i, chunk in enumerate(packed.chunks[1:], start=1):
        total += product(x[:, i * CHUNK : (i + 1) * CHUNK], chunk, None, "none", [], "")
    return total.to(dtype)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the products."""
    narrow = torch.ops.mkldnn._is_mkldnn_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return dtype if dtype != torch.bfloat16 or narrow else torch.float32


def _probe(dtype: torch.dtype) -> bool:
    """Whether a small product has the same bits for one row as for seventeen."""
    rows = torch.linspace(-1, 1, 17 * CHUNK).view(17, CHUNK).to(dtype)
    packed = pack(rows.flip(0).contiguous())
    together = linear(rows, packed)
    return torch.equal(torch.cat([linear(row[None], packed) for row in rows]), together)
