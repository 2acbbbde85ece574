"""Linear layers. A weight is packed once at load; `linear` then multiplies rows by it.

A row's result does not depend on how many rows are computed with it, nor on the number of threads, except in
the `reference` implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.dispatch import op
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.packed import Packed as Packed
from slipstream.kernels.matmul.quantized import Quantized as Quantized


@op("cuda", "triton", "panels", "cpu", "tiled", "reference")
def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    """Lay a weight out for `linear`.

    weight: [out_features, in_features]; of one of few bits the values are those of its `dense()`, whether they are
    widened here or while they are multiplied, and may be multiplied before they are rounded to the dtype.
    bias: [out_features] or None.
    Keeps no reference to `weight` where the layout is a copy: drop yours, or memory holds both.
    """
    raise NotImplementedError


@op("cuda", "triton", "panels", "cpu", "tiled", "reference")
def take_rows(table: Tensor | BlockWeight, row_ids: Tensor) -> Tensor:
    """Some rows of a matrix, as an embedding reads them.

    table: [n_rows, n]. row_ids: [n_ids] int64, each below n_rows. Returns [n_ids, n], the same dtype; of a table in
    blocks the values of its `dense()`.
    """
    raise NotImplementedError


@op("cuda", "triton", "panels", "cpu", "tiled", "reference")
def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight.T + bias.

    x: [n_rows, in_features], dtype of the weight. Returns [n_rows, out_features] in `out_dtype`, by default x's.
    Raises TypeError if `packed` comes from another implementation.

    A weight of few bits that is not widened is `half * factor * value`, plus a minimum for some of GGUF's types, where
    value is a whole number; or `scale * (value - zero)` for AWQ, GPTQ, fp8 and int8, where value is what a code says.
    Its sums are these, all in float32, where fma(a, b, c) is a * b + c rounded once:

        of bfloat16, but for fp8:  group = the exact sum of value * x, rounded once, where x is rounded to the nearest
            2^-14 of the largest power of two in its 32 inputs (of a largest with a mantissa of ones, the power above)
        the same where inputs are rounded to eight bits (`quantized.round_inputs`):  group = step * the exact sum of
            value * whole, rounded before and behind the product, where step = largest / 127 of the absolute values of
            its 32 inputs, rounded, and whole is the nearest whole number to x * (1 / step), the even one of two
        else:  group = 0;  group = group + x₀ value₀ + x₁ value₁ for each two inputs of the group: two fma, or, of fp8
            times bfloat16 on CPUs that have it, their instruction for pairs; or, where there is AMX for it, even + odd
            with even = fma(x₀, value₀, even);  odd = fma(x₁, value₁, odd) for each two inputs from 0 on
        total = bias;  for each block of one group (32 inputs):
            total = fma(half, group, total);  total = fma(minimum, inputs, total) for types with a minimum
        for each block of several groups (256 inputs):
            total = fma(half, sum, total), sum = fma(factor, group, sum) over its groups from 0 on
            total = fma(-second half, sum, total), sum = fma(second factor, inputs, sum), for types with a minimum
        for each block with a scale in float32 (as many of 128, 64, 32 inputs as have one; groups of 32):
            total = fma(scale, sum, total), sum = sum + group, and behind the last group fma(-zero, inputs of all, sum)

    On CUDA a group's exact products are added up in the order of `matmul.cu`, and sums scaled where the next group has
    another scale; a minimum times `inputs`, which are rounded to two numbers of bfloat16, is added among them.

    `inputs` is the sum of the group's inputs: on CPUs of 16 each those 8 apart are added, of the results those 4 apart,
    then 2, then 1; of 32 it is the sum of both sixteens.
    """
    raise NotImplementedError
