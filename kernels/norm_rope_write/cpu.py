"""Head norms, rotary embedding and page write on CPU: one compiled call a layer, each head of each row alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.compiled import (
    bfloat_pointer,
    float_pointer,
    inlined,
    kernel,
    long_pointer,
    pointer_like,
    shifted,
)
from kernels.norm.cpu import inverse_rms
from kernels.norm_rope_write.rows import HeadNorms, Rope, Rows
from kernels.vector import WIDTH, add, load_part, mul, rounded, store_part, sub


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if (dtype, dtype) in _ROWS else "float32 and bfloat16 only"


def norm_rope_write(
    qkv: Tensor, norms: HeadNorms | None, rope: Rope, rows: Rows, keys: Tensor, values: Tensor
) -> Tensor:
    n_rows, n_kv_heads, page_size, d_head = qkv.shape[0], *keys.shape[1:]
    if not (qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("norm_rope_write takes contiguous tensors")
    if not rows.positions.dtype == rows.row_pages.dtype == rows.row_offsets.dtype == torch.int64:
        raise ValueError("positions, row_pages and row_offsets are int64")
    n_heads = qkv.shape[1] // d_head - 2 * n_kv_heads
    q = torch.empty((n_rows, n_heads, d_head), dtype=qkv.dtype)
    _ROWS[qkv.dtype, qkv.dtype if norms is None else norms.q.dtype](
        (qkv.data_ptr(), q.data_ptr(), keys.data_ptr(), values.data_ptr()),
        (norms.q.data_ptr(), norms.k.data_ptr(), norms.eps) if norms is not None else None,
        (rope.cos.data_ptr(), rope.sin.data_ptr()),
        (rows.positions.data_ptr(), rows.row_pages.data_ptr(), rows.row_offsets.data_ptr()),
        (n_rows, n_heads, n_kv_heads, page_size, d_head, rope.cos.shape[1]),
    )
    return q


@inlined
def _normed(source: Any, i: int, count: int, norm: Any) -> Any:
    """Elements i … of a head, normed and rounded as in `norm`. norm: (weight, inverse rms) or None."""
    x = load_part(source, i, count)
    if norm is None:
        return x
    return rounded(mul(rounded(mul(x, norm[1]), norm[0]), load_part(norm[0], i, count)), source)


@inlined
def _turn(source: Any, target: Any, norm: Any, tables: Any, d_head: int, half: int) -> None:
    """Write one head, normed, dimension i turned with i + half. tables: cos and sin of the row's position."""
    cos, sin = tables
    for i in range(0, half, WIDTH):
        n = half - i
        first, second = _normed(source, i, n, norm), _normed(source, half + i, n, norm)
        c, s = load_part(cos, i, n), load_part(sin, i, n)
        store_part(target, i, sub(mul(first, c), mul(second, s)), n)
        store_part(target, half + i, add(mul(second, c), mul(first, s)), n)
    for i in range(2 * half, d_head, WIDTH):
        store_part(target, i, _normed(source, i, d_head - i, norm), d_head - i)


@inlined
def _all_rows(pointers: Any, norms: Any, tables: Any, places: Any, shape: Any) -> None:
    """pointers: (qkv, q, keys, values), typed, and one like the norms' weights. The rest: see `norm_rope_write`."""
    qkv, q, keys, values, scales = pointers
    n_rows, n_heads, n_kv_heads, page_size, d_head, half = shape
    positions, pages, offsets = long_pointer(places[0]), long_pointer(places[1]), long_pointer(places[2])
    for row in range(n_rows):
        turn = positions[row] * half
        table = shifted(float_pointer(tables[0]), turn), shifted(float_pointer(tables[1]), turn)
        cell = (pages[row] * n_kv_heads * page_size + offsets[row]) * d_head
        for head in range(n_heads + n_kv_heads):
            source = shifted(qkv, (row * (n_heads + 2 * n_kv_heads) + head) * d_head)
            if head < n_heads:
                target = shifted(q, (row * n_heads + head) * d_head)
            else:
                target = shifted(keys, cell + (head - n_heads) * page_size * d_head)
            if norms is None:
                _turn(source, target, None, table, d_head, half)
            else:
                weight = pointer_like(norms[0] if head < n_heads else norms[1], scales)
                _turn(source, target, (weight, inverse_rms(source, d_head, norms[2])), table, d_head, half)
        for head in range(n_kv_heads):
            source = shifted(qkv, (row * (n_heads + 2 * n_kv_heads) + n_heads + n_kv_heads + head) * d_head)
            target = shifted(values, cell + head * page_size * d_head)
            for i in range(0, d_head, WIDTH):
                store_part(target, i, load_part(source, i, d_head - i), d_head - i)


@kernel
def _float_rows(tensors: Any, norms: Any, tables: Any, places: Any, shape: Any) -> None:
    qkv, q, keys, values = tensors
    pointers = float_pointer(qkv), float_pointer(q), float_pointer(keys), float_pointer(values)
    _all_rows((*pointers, pointers[0]), norms, tables, places, shape)


@kernel
def _bfloat_rows(tensors: Any, norms: Any, tables: Any, places: Any, shape: Any) -> None:
    qkv, q, keys, values = tensors
    pointers = bfloat_pointer(qkv), bfloat_pointer(q), bfloat_pointer(keys), bfloat_pointer(values)
    _all_rows((*pointers, pointers[0]), norms, tables, places, shape)


@kernel
def _bfloat_rows_float_norms(tensors: Any, norms: Any, tables: Any, places: Any, shape: Any) -> None:
    qkv, q, keys, values = tensors
    pointers = bfloat_pointer(qkv), bfloat_pointer(q), bfloat_pointer(keys), bfloat_pointer(values)
    _all_rows((*pointers, float_pointer(norms[0])), norms, tables, places, shape)


# By dtype of the rows and of the norms' weights.
_ROWS = {
    (torch.float32, torch.float32): _float_rows,
    (torch.bfloat16, torch.bfloat16): _bfloat_rows,
    (torch.bfloat16, torch.float32): _bfloat_rows_float_norms,
}
