"""Gated activation on CPU with its own exp: torch's depends on where vectors end and on the number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.compiled import bfloat_pointer, float_pointer, inlined, kernel, shifted
from kernels.vector import WIDTH, add, div, exp, load_part, mul, splat, store_part, sub


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype in _ROWS else "float32 and bfloat16 only"


def silu_mul(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    n_rows, d_inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, d_inner), dtype=gate_up.dtype)
    _ROWS[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), n_rows, d_inner)
    return out


@inlined
def _all_rows(gate_up: Any, out: Any, n_rows: int, d_inner: int) -> None:
    """Below -88, where `exp` stops growing, what is left of a gate is smaller than 1e-36."""
    one, zero = splat(np.float32(1)), splat(np.float32(0))
    for row in range(n_rows):
        gates = shifted(gate_up, 2 * row * d_inner)
        ups, target = shifted(gates, d_inner), shifted(out, row * d_inner)
        for i in range(0, d_inner, WIDTH):
            n = d_inner - i
            gate = load_part(gates, i, n)
            activated = div(gate, add(one, exp(sub(zero, gate))))
            store_part(target, i, mul(activated, load_part(ups, i, n)), n)


@kernel
def _float_rows(gate_up: int, out: int, n_rows: int, d_inner: int) -> None:
    _all_rows(float_pointer(gate_up), float_pointer(out), n_rows, d_inner)


@kernel
def _bfloat_rows(gate_up: int, out: int, n_rows: int, d_inner: int) -> None:
    _all_rows(bfloat_pointer(gate_up), bfloat_pointer(out), n_rows, d_inner)


_ROWS = {torch.float32: _float_rows, torch.bfloat16: _bfloat_rows}
