"""Gated RMS norm on CPU: one compiled call, every head of every row by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import float_pointer, per_dtype, pointer, shifted
from slipstream.kernels.compiled import refuses as refuses
from slipstream.kernels.exponential import over_one_plus_exp
from slipstream.kernels.gated_norm.reference import check
from slipstream.kernels.norm.cpu import inverse_rms
from slipstream.kernels.row_kernel import RowKernel
from slipstream.kernels.vector import WIDTH, load_part, splat, store_part

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    n_rows, n_heads, d = x.shape
    check(x, gate, weight, activation)
    if gate.stride(-1) != 1:
        gate = gate.contiguous()
    x, weight = x.contiguous(), weight.to(torch.float32).contiguous()
    out = torch.empty((n_rows, n_heads * d), dtype=gate.dtype)
    addresses = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), out.data_ptr()
    shape = n_heads, d, gate.stride(0)
    _rows[x.dtype](addresses, shape, eps, int(activation == "silu"), (0, n_rows))
    return out


@per_dtype
def _rows(kind: Any) -> Any:
    @RowKernel
    def rows(addresses: Any, shape: Any, eps: float, silu: int, span: Any) -> None:
        """addresses: of x, gate, weight and out. shape: (n_heads, d, elements from row to row of gate)."""
        x, gate, out = pointer(addresses[0], kind), pointer(addresses[1], kind), pointer(addresses[3], kind)
        weight = float_pointer(addresses[2])
        n_heads, d, stride = shape
        for row in range(span[0], span[1]):
            for head in range(n_heads):
                start, gates = (row * n_heads + head) * d, shifted(gate, row * stride + head * d)
                scale = inverse_rms(shifted(x, start), d, eps)
                for i in range(0, d, WIDTH):
                    n = d - i
                    opening = load_part(gates, i, n)
                    opened = over_one_plus_exp(opening if silu else splat(np.float32(1)), opening)
                    normed = load_part(x, start + i, n) * scale * load_part(weight, i, n)
                    store_part(out, start + i, normed * opened, n)

    return rows
