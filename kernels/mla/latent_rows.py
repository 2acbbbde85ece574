"""Latents on CPU before attention: norm, rotation and page write, each row alone."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from torch import Tensor

from slipstream.kernels.compiled import (
    emits,
    float_pointer,
    inlined,
    long_pointer,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.mla.latent_types import LatentNorm, LatentRope
from slipstream.kernels.norm.cpu import inverse_rms
from slipstream.kernels.norm_rope_write.rows import Rows, places_of
from slipstream.kernels.row_kernel import RowKernel
from slipstream.kernels.vector import (
    INTS,
    VECTOR,
    WIDTH,
    at_element,
    load_part,
    load_vector,
    rounded,
    rounded_before,
    store_part,
    widen,
)

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)


def write_latents(
    q: Tensor, kv: Tensor, norm: LatentNorm, rope: LatentRope, rows: Rows, latents: Tensor
) -> Tensor:
    n_rows, n_heads, d_query = q.shape
    d_latent = norm.weight.shape[0]
    d_rope = kv.shape[1] - d_latent
    if not (q.is_contiguous() and kv.is_contiguous() and latents.is_contiguous()):
        raise ValueError("write_latents takes contiguous tensors")
    places = places_of(rows)
    turned = q.new_empty((n_rows, n_heads, d_rope))
    tables = (0, 0) if rope.tables is None else (rope.tables.cos.data_ptr(), rope.tables.sin.data_ptr())
    half = 0 if rope.tables is None else d_rope // 2
    _rows[q.dtype, norm.weight.dtype, latents.dtype](
        (q.data_ptr(), kv.data_ptr(), turned.data_ptr(), latents.data_ptr(), norm.weight.data_ptr()),
        norm.eps,
        (tables, (half, rope.interleaved)),
        tuple(one.data_ptr() for one in places),
        (n_heads, d_query, d_latent, d_rope, latents.shape[1]),
        (0, n_rows),
    )
    return turned


def _every_second(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any, first: int) -> Any:
    """Elements index + first, index + first + 2, … of `count` pairs, 0 in the other lanes."""
    long, both = ir.IntType(64), builder.mul(count, ir.IntType(64)(2))
    low = load_vector(builder, at_element(builder, pointer, index), both)
    further = builder.add(index, long(WIDTH))
    high = load_vector(builder, at_element(builder, pointer, further), builder.sub(both, long(WIDTH)))
    lanes = ir.Constant(INTS, list(range(first, 2 * WIDTH, 2)))
    return builder.shuffle_vector(widen(builder, low), widen(builder, high), lanes)


@emits(VECTOR)
def load_even(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any) -> Any:
    """The first elements of `count` pairs from element `index` on."""
    return _every_second(builder, pointer, index, count, 0)


@emits(VECTOR)
def load_odd(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any) -> Any:
    """The second elements of the same."""
    return _every_second(builder, pointer, index, count, 1)


@inlined
def _turn(source: Any, target: Any, d: int, tables: Any, how: Any) -> None:
    """Write d values, turned if `half` is not 0. tables: cos and sin of the position. how: (half, interleaved)."""
    (cos, sin), (half, interleaved) = tables, how
    if half == 0:
        for i in range(0, d, WIDTH):
            store_part(target, i, load_part(source, i, d - i), d - i)
    elif interleaved:
        for i in range(0, half, WIDTH):
            n = half - i
            first, second = load_even(source, 2 * i, n), load_odd(source, 2 * i, n)
            _turn_pair(first, second, target, (load_part(cos, i, n), load_part(sin, i, n)), (i, half, source))
    else:
        for i in range(0, half, WIDTH):
            n = half - i
            first, second = load_part(source, i, n), load_part(source, half + i, n)
            _turn_pair(first, second, target, (load_part(cos, i, n), load_part(sin, i, n)), (i, half, source))


@inlined
def _turn_pair(first: Any, second: Any, target: Any, angle: Any, place: Any) -> None:
    """Write a vector of pairs at i and half + i. place: (i, half, pointer of the kind that values are rounded to)."""
    c, s = angle
    i, half, like = place
    n = half - i
    store_part(target, i, rounded_before(first * c - second * s, like, target), n)
    store_part(target, half + i, rounded_before(second * c + first * s, like, target), n)


@per_dtype
def _rows(kind: Any, scale_kind: Any, store_kind: Any) -> Any:
    @RowKernel
    def rows(tensors: Any, eps: float, rope: Any, places: Any, shape: Any, span: Any) -> None:
        """tensors: (q, kv, rotated queries, latents, scale of the norm); rope: (tables, how) as of `_turn`.

        The rest: see `write_latents`.
        """
        q, kv, turned = pointer(tensors[0], kind), pointer(tensors[1], kind), pointer(tensors[2], kind)
        latents, scale = pointer(tensors[3], store_kind), pointer(tensors[4], scale_kind)
        n_heads, d_query, d_latent, d_rope, page_size = shape
        tables, how = rope
        positions, pages, offsets = long_pointer(places[0]), long_pointer(places[1]), long_pointer(places[2])
        for row in range(span[0], span[1]):
            angle = positions[row] * how[0]
            table = shifted(float_pointer(tables[0]), angle), shifted(float_pointer(tables[1]), angle)
            source = shifted(kv, row * (d_latent + d_rope))
            target = shifted(latents, (pages[row] * page_size + offsets[row]) * (d_latent + d_rope))
            inverse = inverse_rms(source, d_latent, eps)
            for i in range(0, d_latent, WIDTH):
                n = d_latent - i
                normed = rounded(load_part(source, i, n) * inverse, scale) * load_part(scale, i, n)
                store_part(target, i, rounded_before(normed, source, target), n)
            _turn(shifted(source, d_latent), shifted(target, d_latent), d_rope, table, how)
            for head in range(row * n_heads, (row + 1) * n_heads):
                of_head = shifted(q, head * d_query + d_query - d_rope)
                _turn(of_head, shifted(turned, head * d_rope), d_rope, table, how)

    return rows
