"""Definition of `matmul` in plain torch. Its sums do depend on the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.packed import Packed
from slipstream.kernels.matmul.quantized import Quantized, widened


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """The weight as it is."""

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None  # [out_features]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    return PlainWeight(widened(weight), bias)


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    if not isinstance(packed, PlainWeight):
        raise TypeError(f"reference linear got a {type(packed).__name__}; pack the weight with reference too")
    return F.linear(x, packed.weight, packed.bias).to(out_dtype or x.dtype)


def take_rows(table: Tensor | BlockWeight, row_ids: Tensor) -> Tensor:
    return table.index_select(0, row_ids) if isinstance(table, Tensor) else table.rows(row_ids)
