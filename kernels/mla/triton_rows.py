"""Products of heads, and what is written of latents, in Triton: tiles of rows, or each row by itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.mla.latent_types import LatentNorm, LatentRope, PackedHeads
from slipstream.kernels.mla.reference import PlainHeads
from slipstream.kernels.norm.triton import inverse_rms
from slipstream.kernels.norm_rope_write.rows import Rows, places_of
from slipstream.kernels.norm_rope_write.triton import stored
from slipstream.kernels.triton_launch import FUSED, aligned, power_of_two, tiles

HEADS = 8  # of a program that rotates
ROWS, DEPTH = 16, 32  # of a tile of `head_linear`; inputs of a step
COLUMNS = {4: 32, 2: 64}  # of a tile, by bytes of an element: 64 of float32 spill


class DeviceHeads(PlainHeads):
    """Plain matrices that start on 16 bytes, as the kernels read them."""

    __slots__ = ()


def pack_heads(weight: Tensor) -> PackedHeads:
    return DeviceHeads(aligned(weight))


def head_linear(x: Tensor, packed: PackedHeads) -> Tensor:
    if not isinstance(packed, DeviceHeads):
        raise TypeError(f"triton head_linear got a {type(packed).__name__}; pack the heads with triton too")
    (n_rows, n_heads, d_in), d_out = x.shape, packed.out_features
    out = x.new_empty((n_rows, n_heads, d_out))
    if x.stride(2) != 1 or x.stride(1) * x.element_size() % 16:
        x = aligned(x)
    if n_rows > 0:
        columns = COLUMNS[x.element_size()]
        _head_linear[n_heads, tiles(d_out, columns), tiles(n_rows, ROWS)](
            *(x, packed.weight, out, n_rows, x.stride(0), x.stride(1)),
            *(n_heads, d_in, d_out, ROWS, columns, DEPTH),
            num_warps=4,
            **FUSED,
        )
    return out


def write_latents(
    q: Tensor, kv: Tensor, norm: LatentNorm, rope: LatentRope, rows: Rows, latents: Tensor
) -> Tensor:
    n_rows, n_heads, d_query = q.shape
    d_latent = norm.weight.shape[0]
    d_rope = kv.shape[1] - d_latent
    if not latents.is_contiguous() or latents.dtype not in (kv.dtype, torch.float8_e4m3fn):
        raise ValueError(f"latents are contiguous, of {kv.dtype} or float8_e4m3fn, not {latents.dtype}")
    places = places_of(rows)
    turned = q.new_empty((n_rows, n_heads, d_rope))
    if n_rows == 0:
        return turned
    tables = (kv, kv) if rope.tables is None else (rope.tables.cos, rope.tables.sin)
    cos, sin = (one.contiguous() for one in tables)
    half, is_turned = power_of_two(d_rope // 2), rope.tables is not None
    how = is_turned, is_turned and rope.interleaved
    _latents[(n_rows,)](
        *(aligned(kv), as_codes(latents), aligned(norm.weight), norm.eps),
        *(cos, sin, *places),
        *(d_latent, d_rope, latents.shape[1], power_of_two(d_latent), half, *how),
        num_warps=4,
        **FUSED,
    )
    _queries[n_rows, tiles(n_heads, HEADS)](
        *(aligned(q), turned, cos, sin, places[0], n_heads, d_query, d_rope, half, HEADS, *how),
        num_warps=4,
        **FUSED,
    )
    return turned


def as_codes(latents: Tensor) -> Tensor:
    """float8 as its bits: Triton has no such type on compute capability 8.0."""
    return latents.view(torch.uint8) if latents.dtype == torch.float8_e4m3fn else latents


@triton.jit(do_not_specialize=["n_rows", "row_stride", "head_stride"])
def _head_linear(
    x_at,
    weight_at,
    out_at,
    n_rows,
    row_stride,
    head_stride,
    N_HEADS: tl.constexpr,
    D_IN: tl.constexpr,
    D_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    there, exists = (row < n_rows)[:, None], (column < D_OUT)[None, :]
    rows_at = x_at + row[:, None] * row_stride + head * head_stride + k[None, :]  # [ROWS, DEPTH]
    weights_at = weight_at + (head * D_OUT + column)[None, :] * D_IN + k[:, None]  # [DEPTH, COLUMNS]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, D_IN, DEPTH):
        inside = k < D_IN - at
        rows = tl.load(rows_at + at, mask=there & inside[None, :], other=0.0)
        weights = tl.load(weights_at + at, mask=exists & inside[:, None], other=0.0)
        total = tl.dot(rows, weights, total, input_precision="ieee")
    target = out_at + (row[:, None] * N_HEADS + head) * D_OUT + column[None, :]
    tl.store(target, total.to(out_at.dtype.element_ty), mask=there & exists)


@triton.jit
def _turned(at, cos_at, sin_at, i, inside, HALF: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr):
    """Values i and HALF + i of what begins at `at`, rotated. at: a pointer, or a column of them."""
    if PAIRS:
        first_at, second_at = at + 2 * i, at + 2 * i + 1
    else:
        first_at, second_at = at + i, at + HALF + i
    first, second = tl.load(first_at, mask=inside, other=0.0), tl.load(second_at, mask=inside, other=0.0)
    if TURNED:
        cos, sin = (
            tl.load(cos_at + i, mask=i < HALF, other=0.0),
            tl.load(sin_at + i, mask=i < HALF, other=0.0),
        )
        a, b = first.to(tl.float32), second.to(tl.float32)
        kind = first.dtype
        first, second = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    return first, second


@triton.jit
def _latents(
    kv_at,
    latents_at,
    weight_at,
    eps,
    cos_at,
    sin_at,
    positions_at,
    pages_at,
    offsets_at,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_HALF: tl.constexpr,
    TURNED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A row's latent and rotated key."""
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D_ROPE // 2
    angle = tl.load(positions_at + row) * half
    i, j = tl.arange(0, SIZE), tl.arange(0, SIZE_HALF)
    source = kv_at + row * (D_LATENT + D_ROPE)
    cell = tl.load(pages_at + row) * PAGE_SIZE + tl.load(offsets_at + row)
    target = latents_at + cell * (D_LATENT + D_ROPE)
    x = tl.load(source + i, mask=i < D_LATENT, other=0.0)
    wide = x.to(tl.float32)
    weight = tl.load(weight_at + i, mask=i < D_LATENT, other=0.0)
    normed = (wide * inverse_rms(wide * wide, D_LATENT, eps, 0)).to(weight.dtype).to(tl.float32)
    normed = (normed * weight.to(tl.float32)).to(x.dtype)
    tl.store(target + i, stored(normed, latents_at), mask=i < D_LATENT)
    key_at, cos_at, sin_at = source + D_LATENT, cos_at + angle, sin_at + angle
    first, second = _turned(key_at, cos_at, sin_at, j, j < half, half, TURNED, PAIRS)
    tl.store(target + D_LATENT + j, stored(first, latents_at), mask=j < half)
    tl.store(target + D_LATENT + half + j, stored(second, latents_at), mask=j < half)


@triton.jit
def _queries(
    q_at,
    turned_at,
    cos_at,
    sin_at,
    positions_at,
    N_HEADS: tl.constexpr,
    D_QUERY: tl.constexpr,
    D_ROPE: tl.constexpr,
    SIZE_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The rotated part of some heads' queries."""
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D_ROPE // 2
    angle = tl.load(positions_at + row) * half
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    j = tl.arange(0, SIZE_HALF)[None, :]
    inside = (head < N_HEADS) & (j < half)
    source = q_at + (row * N_HEADS + head) * D_QUERY + (D_QUERY - D_ROPE)
    first, second = _turned(source, cos_at + angle, sin_at + angle, j, inside, half, TURNED, PAIRS)
    target = turned_at + (row * N_HEADS + head) * D_ROPE + j
    tl.store(target, first, mask=inside)
    tl.store(target + half, second, mask=inside)
