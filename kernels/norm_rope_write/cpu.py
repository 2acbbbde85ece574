"""Head norms, rotary embedding and page write on CPU: one compiled call a layer, each head of each row alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.compiled import (
    bfloat_pointer,
    float_pointer,
    fp8_pointer,
    inlined,
    kernel,
    long_pointer,
    pointer_like,
    shifted,
)
from slipstream.kernels.norm.cpu import inverse_rms
from slipstream.kernels.norm_rope_write.rows import HeadNorms, Rope, Rows
from slipstream.kernels.vector import WIDTH, add, load_part, mul, rounded, rounded_before, store_part, sub


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if (dtype, dtype, dtype) in _ROWS else "float32 and bfloat16 only"


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
    _ROWS[qkv.dtype, qkv.dtype if norms is None else norms.q.dtype, keys.dtype](
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
def _turn(source: Any, target: Any, norm: Any, tables: Any, widths: Any) -> None:
    """Write one head, normed, dimension i turned with i + half. tables: cos and sin of the row's position."""
    (cos, sin), (d_head, half) = tables, widths
    for i in range(0, half, WIDTH):
        n = half - i
        first, second = _normed(source, i, n, norm), _normed(source, half + i, n, norm)
        c, s = load_part(cos, i, n), load_part(sin, i, n)
        store_part(target, i, rounded_before(sub(mul(first, c), mul(second, s)), source, target), n)
        store_part(target, half + i, rounded_before(add(mul(second, c), mul(first, s)), source, target), n)
    for i in range(2 * half, d_head, WIDTH):
        store_part(target, i, _normed(source, i, d_head - i, norm), d_head - i)


@inlined
def _head(source: Any, target: Any, norms: Any, own: Any, table: Any, widths: Any) -> None:
    """Norm and turn one head. own: (which of the norms is its, a pointer of their weights' kind)."""
    which, scales = own
    if norms is None:
        _turn(source, target, None, table, widths)
    else:
        weight = pointer_like(norms[0] if which == 0 else norms[1], scales)
        _turn(source, target, (weight, inverse_rms(source, widths[0], norms[2])), table, widths)


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
        heads = shifted(qkv, row * (n_heads + 2 * n_kv_heads) * d_head)
        for head in range(n_heads):
            target = shifted(q, (row * n_heads + head) * d_head)
            _head(shifted(heads, head * d_head), target, norms, (0, scales), table, (d_head, half))
        for head in range(n_kv_heads):
            target = shifted(keys, cell + head * page_size * d_head)
            _head(
                shifted(heads, (n_heads + head) * d_head), target, norms, (1, scales), table, (d_head, half)
            )
        for head in range(n_kv_heads):
            source = shifted(heads, (n_heads + n_kv_heads + head) * d_head)
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


@kernel
def _float_rows_to_fp8(tensors: Any, norms: Any, tables: Any, places: Any, shape: Any) -> None:
    qkv, q, keys, values = tensors
    pointers = float_pointer(qkv), float_pointer(q), fp8_pointer(keys), fp8_pointer(values)
    _all_rows((*pointers, pointers[0]), norms, tables, places, shape)


@kernel
def _bfloat_rows_to_fp8(tensors: Any, norms: Any, tables: Any, places: Any, shape: Any) -> None:
    qkv, q, keys, values = tensors
    pointers = bfloat_pointer(qkv), bfloat_pointer(q), fp8_pointer(keys), fp8_pointer(values)
    _all_rows((*pointers, pointers[0]), norms, tables, places, shape)


@kernel
def _bfloat_rows_float_norms_to_fp8(tensors: Any, norms: Any, tables: Any, places: Any, shape: Any) -> None:
    qkv, q, keys, values = tensors
    pointers = bfloat_pointer(qkv), bfloat_pointer(q), fp8_pointer(keys), fp8_pointer(values)
    _all_rows((*pointers, float_pointer(norms[0])), norms, tables, places, shape)


FLOAT, BFLOAT, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
# By dtype of the rows, of the norms' weights and of the stores.
_ROWS = {
    (FLOAT, FLOAT, FLOAT): _float_rows,
    (BFLOAT, BFLOAT, BFLOAT): _bfloat_rows,
    (BFLOAT, FLOAT, BFLOAT): _bfloat_rows_float_norms,
    (FLOAT, FLOAT, FP8): _float_rows_to_fp8,
    (BFLOAT, BFLOAT, FP8): _bfloat_rows_to_fp8,
    (BFLOAT, FLOAT, FP8): _bfloat_rows_float_norms_to_fp8,
}
