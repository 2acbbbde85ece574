"""Head norms, rotary embedding and page write on CPU: one compiled call a layer.

Values that the definition rounds are stored and read back, so one body serves float32 and bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.compiled import bfloat_pointer, float_pointer, inlined, kernel, long_pointer, shifted
from kernels.norm.cpu import norm_row
from kernels.norm_rope_write.rows import HeadNorms, Rope, Rows
from kernels.vector import WIDTH, add, load_part, mul, splat, store_part, sub


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype in _ROWS else "float32 and bfloat16 only"


def norm_rope_write(
    qkv: Tensor, norms: HeadNorms | None, rope: Rope, rows: Rows, keys: Tensor, values: Tensor
) -> Tensor:
    n_rows, n_kv_heads, page_size, d_head = qkv.shape[0], *keys.shape[1:]
    if not (qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("norm_rope_write takes contiguous tensors")
    n_heads = qkv.shape[1] // d_head - 2 * n_kv_heads
    q = torch.empty((n_rows, n_heads, d_head), dtype=qkv.dtype)
    _ROWS[qkv.dtype](
        (qkv.data_ptr(), q.data_ptr(), keys.data_ptr(), values.data_ptr()),
        (norms.q.data_ptr(), norms.k.data_ptr()) if norms is not None else (0, 0),
        (rope.cos.data_ptr(), rope.sin.data_ptr()),
        (rows.positions.data_ptr(), rows.row_pages.data_ptr(), rows.row_offsets.data_ptr()),
        (n_rows, n_heads, n_kv_heads, page_size, d_head, rope.cos.shape[1]),
        norms.eps if norms is not None else 0.0,
    )
    return q


@inlined
def _row(row: int, source: Any, targets: Any, norms: Any, tables: Any, places: Any, shape: Any, eps: float) -> None:
    """All heads of one row. targets: (q, keys, values); norms: (q, k, whether there are any)."""
    _, n_heads, n_kv_heads, page_size, d_head, half = shape
    position = long_pointer(places[0])[row]
    cos = shifted(float_pointer(tables[0]), position * half)
    sin = shifted(float_pointer(tables[1]), position * half)
    heads = shifted(source, row * (n_heads + 2 * n_kv_heads) * d_head)
    stride = page_size * d_head
    cell = long_pointer(places[1])[row] * n_kv_heads * stride + long_pointer(places[2])[row] * d_head
    for head in range(n_heads):
        target = shifted(targets[0], (row * n_heads + head) * d_head)
        _copy(shifted(heads, head * d_head), target, d_head)
        if norms[2]:
            norm_row(target, norms[0], target, d_head, eps)
        _rotate(target, cos, sin, half)
    for head in range(n_kv_heads):
        target = shifted(targets[1], cell + head * stride)
        _copy(shifted(heads, (n_heads + head) * d_head), target, d_head)
        if norms[2]:
            norm_row(target, norms[1], target, d_head, eps)
        _rotate(target, cos, sin, half)
        _copy(shifted(heads, (n_heads + n_kv_heads + head) * d_head), shifted(targets[2], cell + head * stride), d_head)


@inlined
def _copy(source: Any, target: Any, d_head: int) -> None:
    for i in range(0, d_head, WIDTH):
        store_part(target, i, load_part(source, i, d_head - i), d_head - i)


@inlined
def _rotate(head: Any, cos: Any, sin: Any, half: int) -> None:
    """Turn dimension i with i + half, in place."""
    upper = shifted(head, half)
    for i in range(0, half, WIDTH):
        n = half - i
        first, second = load_part(head, i, n), load_part(upper, i, n)
        c, s = load_part(cos, i, n), load_part(sin, i, n)
        store_part(head, i, sub(mul(first, c), mul(second, s)), n)
        store_part(upper, i, add(mul(second, c), mul(first, s)), n)


@kernel
def _rows_float(tensors: Any, norms: Any, tables: Any, places: Any, shape: Any, eps: float) -> None:
    targets = float_pointer(tensors[1]), float_pointer(tensors[2]), float_pointer(tensors[3])
    weights = float_pointer(norms[0]), float_pointer(norms[1]), norms[0] != 0
    for row in range(shape[0]):
        _row(row, float_pointer(tensors[0]), targets, weights, tables, places, shape, eps)


@kernel
def _rows_bfloat(tensors: Any, norms: Any, tables: Any, places: Any, shape: Any, eps: float) -> None:
    targets = bfloat_pointer(tensors[1]), bfloat_pointer(tensors[2]), bfloat_pointer(tensors[3])
    weights = bfloat_pointer(norms[0]), bfloat_pointer(norms[1]), norms[0] != 0
    for row in range(shape[0]):
        _row(row, bfloat_pointer(tensors[0]), targets, weights, tables, places, shape, eps)


_ROWS = {torch.float32: _rows_float, torch.bfloat16: _rows_bfloat}
