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
def _row(gate: Any, out: Any, d_inner: int) -> None:
    """One row; the up values follow the gates. A gate below -87 gives 0 · up, as exp stops growing there."""
    one, zero = splat(np.float32(1)), splat(np.float32(0))
    up = shifted(gate, d_inner)
    for i in range(0, d_inner, WIDTH):
        n = d_inner - i
        g = load_part(gate, i, n)
        activated = div(g, add(one, exp(sub(zero, g))))
        store_part(out, i, mul(activated, load_part(up, i, n)), n)


@kernel
def _rows_float(gate_up: int, out: int, n_rows: int, d_inner: int) -> None:
    for row in range(n_rows):
        _row(shifted(float_pointer(gate_up), 2 * row * d_inner), shifted(float_pointer(out), row * d_inner), d_inner)


@kernel
def _rows_bfloat(gate_up: int, out: int, n_rows: int, d_inner: int) -> None:
    for row in range(n_rows):
        _row(shifted(bfloat_pointer(gate_up), 2 * row * d_inner), shifted(bfloat_pointer(out), row * d_inner), d_inner)


_ROWS = {torch.float32: _rows_float, torch.bfloat16: _rows_bfloat}
