"""Linear layers in float32 on CUDA, for routers and other small matrices, in tiles of one shape and one order.

A row's sum runs over the inner dimension in steps of the same size whatever rows are computed with it, so it has the
same bits alone and beside others; torch's own product has not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.matmul.packed import Packed
from slipstream.kernels.matmul.quantized import Quantized, widened
from slipstream.kernels.matmul.reference import PlainWeight
from slipstream.kernels.matmul.reference import take_rows as take_rows
from slipstream.kernels.triton_launch import FUSED, aligned, refuses_device, tiles

ROWS, COLUMNS, DEPTH = 16, 32, 32  # of a tile; inputs of a step


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refuses_device(device) if dtype == torch.float32 else "float32 only"


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    return PlainWeight(aligned(widened(weight)), None if bias is None else bias.contiguous())


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    if not isinstance(packed, PlainWeight):
        raise TypeError(f"triton linear got a {type(packed).__name__}; pack the weight with triton too")
    x, weight = aligned(x), packed.weight
    (n_rows, d_in), d_out = x.shape, weight.shape[0]
    out = torch.empty((n_rows, d_out), dtype=x.dtype, device=x.device)
    if n_rows > 0:
        bias = weight if packed.bias is None else packed.bias
        _linear[tiles(n_rows, ROWS), tiles(d_out, COLUMNS)](
            *(x, weight, bias, out, n_rows, d_in, d_out, ROWS, COLUMNS, DEPTH, packed.bias is not None),
            num_warps=4,
            **FUSED,
        )
    return out.to(out_dtype or x.dtype)


@triton.jit(do_not_specialize=["n_rows"])
def _linear(
    x_at,
    weight_at,
    bias_at,
    out_at,
    n_rows,
    D_IN: tl.constexpr,
    D_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    there, exists = (row < n_rows)[:, None], (column < D_OUT)[None, :]
    rows_at = x_at + row[:, None] * D_IN + k[None, :]  # [ROWS, DEPTH]
    weights_at = weight_at + column[None, :] * D_IN + k[:, None]  # [DEPTH, COLUMNS]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, D_IN, DEPTH):
        inside = k < D_IN - at
        rows = tl.load(rows_at + at, mask=there & inside[None, :], other=0.0)
        weights = tl.load(weights_at + at, mask=exists & inside[:, None], other=0.0)
        total = tl.dot(rows, weights, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias_at + column, mask=column < D_OUT, other=0.0)[None, :]
    tl.store(out_at + row[:, None] * D_OUT + column[None, :], total, mask=there & exists)
