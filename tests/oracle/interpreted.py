"""Triton kernels run on the CPU by Triton's interpreter, with what it gets wrong put right.

Whether kernels are interpreted is decided when Triton is imported; `tests/conftest.py` sees to that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.experimental.gluon  # a first launch would import it, and it asks once more whether to interpret
import triton.language as tl
from triton.runtime import interpreter

if not isinstance(triton.language.standard.sum, interpreter.InterpretedFunction):
    raise RuntimeError("triton was imported before tests/conftest.py could have its kernels interpreted")

_their_cast = interpreter.InterpreterBuilder.cast_impl
_their_patch = interpreter._patch_lang
_patched: dict[int, Any] = {}


def _cast(self: Any, source: Any, kind: Any) -> Any:
    """float32 to bfloat16 rounds to nearest even, as on the device; the interpreter cuts bits off."""
    pair = source.dtype.scalar, kind.scalar
    data = np.ascontiguousarray(source.data)
    if pair == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(data).to(torch.bfloat16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded.reshape(source.data.shape), kind.scalar)
    if pair == (tl.bfloat16, tl.float32):
        wide = (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return interpreter.TensorHandle(wide.reshape(source.data.shape), kind.scalar)
    return _their_cast(self, source, kind)


def _dot(self: Any, a: Any, b: Any, total: Any, *how: Any) -> Any:
    """Sums in ascending order, as alike for all rows as on a tensor core: NumPy's depend on a row's place in its tile.

    The interpreter also multiplies the bits of bfloat16 instead of the numbers.
    """
    rows, columns = (
        (_cast(self, one, tl.float32) if one.dtype.scalar == tl.bfloat16 else one).data.astype(np.float32)
        for one in (a, b)
    )
    out = total.data.copy()
    for k in range(rows.shape[1]):
        out += rows[:, k : k + 1] * columns[k : k + 1]
    return interpreter.TensorHandle(out, total.dtype.scalar)


def _splat(self: Any, kind: Any, scalar: Any) -> Any:
    """A tile of a scalar has the scalar's kind; the interpreter makes numbers of truths."""
    values = np.full(kind.shape, scalar.data.reshape(-1)[0], dtype=scalar.data.dtype)
    return interpreter.TensorHandle(values, scalar.dtype.scalar)


class _Kept:
    """Stands for changes of Triton's language that stay."""

    def restore(self) -> None:
        pass


def _patch_once(function: Any) -> _Kept:
    """The language is changed for interpretation once per module, not in every call of every function."""
    if id(function.__globals__) not in _patched:
        _patched[id(function.__globals__)] = _their_patch(function)
        # Up to Triton 3.6 an array of one element is taken for a number, which numpy 2.4 refuses.
        tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    return _Kept()


interpreter._patch_lang = _patch_once
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.create_splat = _splat


# How far a result may be from the definition's in the same dtype: float32 arithmetic in another order, rounded once.
STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def assert_near(got: torch.Tensor, meant: torch.Tensor, *, steps: int = 1, share: float = 3e-6) -> None:
    """Equal shapes and dtypes, NaN in the same places, differences of `steps` roundings and a share of the largest.

    In narrow dtypes few elements may differ at all: one that is rounded at another place often differs by a step.
    """
    assert got.shape == meant.shape
    assert got.dtype == meant.dtype
    assert torch.equal(got.isnan(), meant.isnan())
    far = (got.double() - meant.double()).abs().nan_to_num()
    size = meant.double().abs().nan_to_num()
    largest = size.max().item() if size.numel() else 0.0
    if meant.dtype != torch.float32:
        assert int((far > 0).sum()) <= 2 + 0.03 * steps * far.numel()
    assert bool((far <= steps * STEP[meant.dtype] * size + share * max(largest, 1e-3)).all()), far.max()
