"""Head norms, rotary embedding and page write on CPU: one compiled call a layer, each head of each row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import (
    float_pointer,
    inlined,
    long_pointer,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.compiled import refuses as refuses
from slipstream.kernels.norm.cpu import inverse_rms
from slipstream.kernels.norm_rope_write.rows import HeadNorms, Rope, Rows, count_query_heads, places_of
from slipstream.kernels.row_kernel import RowKernel
from slipstream.kernels.vector import WIDTH, load_part, rounded, rounded_before, splat, store_part

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)


def norm_rope_write(
    qkv: Tensor, norms: HeadNorms | None, rope: Rope, rows: Rows, keys: Tensor, values: Tensor
) -> Tensor:
    n_rows, n_kv_heads, page_size, d_head = qkv.shape[0], *keys.shape[1:]
    if not (qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("norm_rope_write takes contiguous tensors")
    places = places_of(rows)
    n_heads = count_query_heads(qkv, keys, values)
    q = torch.empty((n_rows, n_heads, d_head), dtype=qkv.dtype)
    scales = (0, 0) if norms is None else (norms.q.data_ptr(), norms.k.data_ptr())
    _rows[qkv.dtype, qkv.dtype if norms is None else norms.q.dtype, keys.dtype](
        (qkv.data_ptr(), q.data_ptr(), keys.data_ptr(), values.data_ptr(), *scales),
        (None if norms is None else norms.eps, norms is not None and norms.values),
        (rope.cos.data_ptr(), rope.sin.data_ptr()),
        tuple(one.data_ptr() for one in places),
        (n_heads, n_kv_heads, page_size, d_head, values.shape[3], rope.cos.shape[1]),
        (0, n_rows),
    )
    return q


def norm_rope(q: Tensor, d_head: int, norms: HeadNorms | None, rope: Rope, rows: Rows) -> Tensor:
    none = q.new_empty((0, 0, 1, d_head))  # a store without heads: nothing is written
    return norm_rope_write(q.contiguous(), norms, rope, rows, none, none)


@inlined
def _normed(source: Any, i: int, count: int, norm: Any) -> Any:
    """Elements i … of a head, normed and rounded as in `norm`. norm: (weight, inverse rms) or None."""
    x = load_part(source, i, count)
    if norm is None:
        return x
    return rounded(rounded(x * norm[1], norm[0]) * load_part(norm[0], i, count), source)


@inlined
def _turn(source: Any, target: Any, norm: Any, tables: Any, widths: Any) -> None:
    """Write one head, normed, dimension i turned with i + half. tables: cos and sin of the row's position."""
    (cos, sin), (d_head, half) = tables, widths
    for i in range(0, half, WIDTH):
        n = half - i
        first, second = _normed(source, i, n, norm), _normed(source, half + i, n, norm)
        c, s = load_part(cos, i, n), load_part(sin, i, n)
        store_part(target, i, rounded_before(first * c - second * s, source, target), n)
        store_part(target, half + i, rounded_before(second * c + first * s, source, target), n)
    for i in range(2 * half, d_head, WIDTH):
        store_part(target, i, _normed(source, i, d_head - i, norm), d_head - i)


@inlined
def _head(source: Any, target: Any, scale: Any, eps: Any, table: Any, widths: Any) -> None:
    """Norm and turn one head. eps: None for heads that are not normed."""
    if eps is None:
        _turn(source, target, None, table, widths)
    else:
        _turn(source, target, (scale, inverse_rms(source, widths[0], eps)), table, widths)


@inlined
def _value(source: Any, target: Any, eps: Any, is_normed: Any, d_value: int) -> None:
    """Write a value head. eps: None where no head is normed."""
    scale = splat(np.float32(1))
    if eps is not None and is_normed:
        scale = inverse_rms(source, d_value, eps)
    for i in range(0, d_value, WIDTH):
        value = load_part(source, i, d_value - i) * scale
        store_part(target, i, rounded_before(value, source, target), d_value - i)


@per_dtype
def _rows(kind: Any, scale_kind: Any, store_kind: Any) -> Any:
    @RowKernel
    def rows(tensors: Any, norms: Any, tables: Any, places: Any, shape: Any, span: Any) -> None:
        """tensors: (qkv, q, keys, values, scales of q and of k); norms: (eps or None, whether values are normed).

        The rest: see `norm_rope_write`.
        """
        eps, norms_values = norms
        qkv, q = pointer(tensors[0], kind), pointer(tensors[1], kind)
        keys, values = pointer(tensors[2], store_kind), pointer(tensors[3], store_kind)
        q_scale, k_scale = pointer(tensors[4], scale_kind), pointer(tensors[5], scale_kind)
        n_heads, n_kv_heads, page_size, d_head, d_value, half = shape
        positions, pages, offsets = long_pointer(places[0]), long_pointer(places[1]), long_pointer(places[2])
        for row in range(span[0], span[1]):
            turn, widths = positions[row] * half, (d_head, half)
            table = shifted(float_pointer(tables[0]), turn), shifted(float_pointer(tables[1]), turn)
            cell = pages[row] * n_kv_heads * page_size + offsets[row]
            heads = shifted(qkv, row * ((n_heads + n_kv_heads) * d_head + n_kv_heads * d_value))
            for head in range(n_heads):
                target = shifted(q, (row * n_heads + head) * d_head)
                _head(shifted(heads, head * d_head), target, q_scale, eps, table, widths)
            for head in range(n_kv_heads):
                source = shifted(heads, (n_heads + head) * d_head)
                target = shifted(keys, (cell + head * page_size) * d_head)
                _head(source, target, k_scale, eps, table, widths)
            for head in range(n_kv_heads):
                source = shifted(heads, (n_heads + n_kv_heads) * d_head + head * d_value)
                target = shifted(values, (cell + head * page_size) * d_value)
                _value(source, target, eps, norms_values, d_value)

    return rows
