"""Products with packed codes as `kernels/matmul/op.py` describes them, step by step, for tests of the compiled ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.compiled import float_pointer, kernel
from slipstream.kernels.matmul import narrow, quantized
from slipstream.kernels.matmul.formats import OF_A8, OF_BYTES, OF_FLOATS, OF_PAIRS, OF_TILES, OF_UNITS
from slipstream.kernels.pairs import add_pairs
from slipstream.kernels.vector import fma, load, splat, store

WAYS = OF_BYTES, OF_FLOATS, OF_A8  # what products with whole numbers may be of
EXACT = OF_BYTES, OF_UNITS, OF_A8  # those whose sums are of integers
# Largest difference from float64, as a share of the largest result, where it is not that of float32's rounding.
OFF = {OF_BYTES: 1e-5, OF_A8: 2e-2}


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack weights from now on for products of that kind where they have any, as another CPU would."""
    monkeypatch.setattr(quantized, "_rounds", way == OF_A8)
    if way not in narrow.ways():
        pytest.skip(f"this CPU has no products of {way}")
    monkeypatch.setattr(narrow, "ways", lambda: [way, OF_FLOATS])


def inputs(n_rows: int, n_in: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n_rows, n_in, generator=torch.Generator().manual_seed(n_in)).to(dtype)


@kernel
def group_sums(x: int, values: int, out: int, n_in: int, by_pairs: bool) -> None:
    """Add to out, [16] float32, one row times 16 outputs. x: float32 [n_in], or pairs; values: [n_in, 16], or pairs."""
    total = load(float_pointer(out), 0)
    for i in range(n_in // 2):
        if by_pairs:
            total = add_pairs(total, splat(float_pointer(x)[i]), load(float_pointer(values), i * 16))
        else:
            for k in range(2 * i, 2 * i + 2):
                total = fma(splat(float_pointer(x)[k]), load(float_pointer(values), k * 16), total)
    store(float_pointer(out), 0, total)


@kernel
def tiled_sums(x: int, values: int, out: int, n_in: int) -> None:
    """The same as AMX adds, even inputs and odd ones apart. x: float32 [n_in]; values: float32 [n_in, 16]."""
    even, odd = splat(np.float32(0)), splat(np.float32(0))
    for i in range(0, n_in, 2):
        even = fma(splat(float_pointer(x)[i]), load(float_pointer(values), i * 16), even)
        odd = fma(splat(float_pointer(x)[i + 1]), load(float_pointer(values), (i + 1) * 16), odd)
    store(float_pointer(out), 0, load(float_pointer(out), 0) + (even + odd))


@kernel
def fused(a: int, b: int, c: int, n: int) -> None:
    """c = a * b + c rounded once, for n floats, n a multiple of 16."""
    for i in range(0, n, 16):
        total = fma(load(float_pointer(a), i), load(float_pointer(b), i), load(float_pointer(c), i))
        store(float_pointer(c), i, total)


def added(total: Any, a: Any, b: Any) -> Any:
    """fma(a, b, total), [16] float32."""
    a, b = (np.ascontiguousarray(np.broadcast_to(one, 16), np.float32) for one in (a, b))
    result = np.array(total, np.float32)
    fused(a.ctypes.data, b.ctypes.data, result.ctypes.data, 16)
    return result


def sum_of_inputs(x: Any) -> Any:
    """Of 16 or 32 float32, as `op.py` says."""
    if len(x) == 32:
        return sum_of_inputs(x[:16]) + sum_of_inputs(x[16:])
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def in_units(x: Tensor) -> Tensor:
    """Rounded to 2^-14 of the power of two that is at most the largest of each 32, float64. x: [n_in] bfloat16.

    A largest number with a mantissa of ones counts as the power of two above it.
    """
    wide = x.double().unflatten(0, (-1, 32))
    mantissa, exponent = torch.frexp(wide.abs().amax(1, keepdim=True))  # from 0.5 on, below 1
    units = 2.0 ** (exponent - 15 + (mantissa >= 1 - 2**-8).to(exponent.dtype)).double()
    return ((wide / units).round() * units).flatten()


def in_steps(x: Tensor) -> tuple[Tensor, Any]:
    """Whole numbers, float64, of steps [n_in / 32] float32: a 127th of the largest of each 32. x: [n_in] bfloat16."""
    wide = x.float().unflatten(0, (-1, 32))
    steps = wide.abs().amax(1, keepdim=True).clamp(min=2.0**-95) / torch.tensor(127.0)
    return (wide.double() * (1 / steps).double()).round().flatten(), steps[:, 0].numpy()


def read(x: Tensor, way: str) -> tuple[Tensor, Any]:
    """What a product multiplies of inputs [n_in], and with what it multiplies the sums of it, [n_in / 32] float32."""
    if way == OF_A8:
        return in_steps(x)
    return (in_units(x) if way in EXACT else x), np.ones(len(x) // 32, np.float32)


def one_group(x: Tensor, values: Any, way: str) -> Any:
    """x: [group] of `read`; values: [16, group]."""
    out = np.zeros(16, np.float32)
    if way in EXACT:  # all of it has fewer digits than float64
        exact: Any = (torch.from_numpy(values).double() @ x).float().numpy()
        return exact
    if way == OF_TILES:
        x, turned = x.float().contiguous(), torch.from_numpy(values).float().t().contiguous()
        tiled_sums(x.data_ptr(), turned.data_ptr(), out.ctypes.data, len(x))
        return out
    by_pairs = way == OF_PAIRS
    x = x if by_pairs else x.float()
    turned = torch.from_numpy(values).to(x.dtype)  # [16, group]: whole numbers, so nothing is rounded
    # [group / 2, 16, 2], or [group, 16] if not by pairs
    turned = (turned.unflatten(1, (-1, 2)).transpose(0, 1) if by_pairs else turned.t()).contiguous()
    x = x.contiguous()
    group_sums(x.data_ptr(), turned.data_ptr(), out.ctypes.data, len(x), by_pairs)
    return out
