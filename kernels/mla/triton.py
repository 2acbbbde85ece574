"""Multi-head latent attention in Triton: a tile is some heads of one row, over a run of positions of a fixed length.

Runs of 512 positions lie at fixed places and are joined in ascending order, so that a row's bits follow from its
position and the latents alone. Sums of runs are kept in float32 between two launches, of some rows at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention.spans import Spans
from slipstream.kernels.mla.types import LatentNorm, LatentRope, PackedHeads, check_latents
from slipstream.kernels.norm.triton import inverse_rms
from slipstream.kernels.norm_rope_write.rows import Rows
from slipstream.kernels.norm_rope_write.triton import stored
from slipstream.kernels.triton_launch import FUSED, ROUNDED, aligned, power_of_two, tiles
from slipstream.kernels.triton_launch import refuses as refuses

RUN = 512  # positions of a program
STEP = 16  # positions of a product
LANES = 16  # heads of a tile: the least rows of a tensor core's product
SPANS = 128  # ends of spans looked at together
SUMS = 512  # elements of a program that joins runs
MOST_SUMS = 1 << 26  # floats kept between the two launches
HEADS = 8  # of a program that rotates
ROWS, COLUMNS, DEPTH = 16, 64, 32  # of a tile of `head_linear`; inputs of a step


@dataclass(frozen=True, slots=True)
class DeviceHeads:
    """The matrices as they came, starting on 16 bytes."""

    weight: Tensor  # [n_heads, out_features, in_features]

    @property
    def n_heads(self) -> int:
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]


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
        _head_linear[n_heads, tiles(d_out, COLUMNS), tiles(n_rows, ROWS)](
            *(x, packed.weight, out, n_rows, x.stride(0), x.stride(1)),
            *(n_heads, d_in, d_out, ROWS, COLUMNS, DEPTH),
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
    places = rows.positions, rows.row_pages, rows.row_offsets
    if not all(x.dtype == torch.int64 for x in places):
        raise ValueError("positions, row_pages and row_offsets are int64")
    turned = q.new_empty((n_rows, n_heads, d_rope))
    if n_rows == 0:
        return turned
    tables = (kv, kv) if rope.tables is None else (rope.tables.cos, rope.tables.sin)
    cos, sin, positions, pages, offsets = (x.contiguous() for x in (*tables, *places))
    half, is_turned = power_of_two(d_rope // 2), rope.tables is not None
    how = is_turned, is_turned and rope.interleaved
    _latents[(n_rows,)](
        *(aligned(kv), _as_codes(latents), aligned(norm.weight), norm.eps),
        *(cos, sin, positions, pages, offsets),
        *(d_latent, d_rope, latents.shape[1], power_of_two(d_latent), half, *how),
        num_warps=4,
        **FUSED,
    )
    _queries[n_rows, tiles(n_heads, HEADS)](
        *(aligned(q), turned, cos, sin, positions, n_heads, d_query, d_rope, half, HEADS, *how),
        num_warps=4,
        **FUSED,
    )
    return turned


def latent_attention(q: Tensor, q_rope: Tensor, latents: Tensor, spans: Spans, scale: float) -> Tensor:
    check_latents(q, q_rope, latents)
    if not latents.is_contiguous() or latents.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise ValueError(f"latents are contiguous, of {q.dtype} or float8_e4m3fn, not {latents.dtype}")
    q, q_rope, out = aligned(q), aligned(q_rope), torch.empty_like(q, memory_format=torch.contiguous_format)
    (n_rows, n_heads, d_latent), d_rope = q.shape, q_rope.shape[2]
    n_spans, n_pages = spans.page_table.shape
    if n_rows == 0 or n_spans == 0:
        return out
    n_runs = tiles(n_pages * latents.shape[1], RUN)
    n_at_once = max(1, min(n_rows, MOST_SUMS // (n_heads * n_runs * d_latent)))
    sums = torch.empty((n_at_once, n_heads, n_runs, d_latent), dtype=torch.float32, device=q.device)
    softmax = torch.empty((n_at_once, n_heads, n_runs, 2), dtype=torch.float32, device=q.device)
    batch = spans.span_starts.contiguous(), spans.n_past.contiguous(), spans.page_table.contiguous()
    sizes = n_heads, d_latent
    for first in range(0, n_rows, n_at_once):
        n = min(n_at_once, n_rows - first)
        _attend[n * tiles(n_heads, LANES), n_runs](
            *(q, q_rope, _as_codes(latents), *batch, sums, softmax, first, n_spans, n_pages, n_runs),
            *(scale * math.log2(math.e), *sizes, d_rope, latents.shape[1]),
            *(power_of_two(d_latent), power_of_two(d_rope), LANES, STEP, RUN, SPANS),
            num_warps=8,
            num_stages=2,
            **FUSED,
        )
        _join[n * n_heads, tiles(d_latent, SUMS)](
            *(sums, softmax, batch[0], batch[1], out, first, n_spans, n_runs, *sizes, SUMS, RUN, SPANS),
            num_warps=4,
            **ROUNDED,
        )
    return out


def _as_codes(latents: Tensor) -> Tensor:
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


@triton.jit
def _span_of(row, starts_at, n_spans, SPANS: tl.constexpr):
    """The span that owns a row: those that end before it are counted. n_spans if none does."""
    span = 0
    for block in range(0, n_spans, SPANS):
        i = block + tl.arange(0, SPANS)
        ends = tl.load(starts_at + 1 + i, mask=i < n_spans, other=2147483647)
        span += tl.sum((ends <= row).to(tl.int32), 0)
    return span


@triton.jit
def _values(codes, like: tl.constexpr):
    """What was loaded from a store, in the queries' dtype. uint8 stands for float8_e4m3fn."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.int32)
        size = bits & 0x7F
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        value = tl.where(size == 0x7F, float("nan"), value)
        values = tl.where(bits > 0x7F, -value, value).to(like)
    else:
        values = codes
    return values


@triton.jit(do_not_specialize=["first_row", "n_spans", "n_pages", "n_runs"])
def _attend(
    q_at,
    q_rope_at,
    latents_at,
    starts_at,
    past_at,
    table_at,
    sums_at,
    softmax_at,
    first_row,
    n_spans,
    n_pages,
    n_runs,
    scale,
    N_HEADS: tl.constexpr,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_ROPE: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Weighted sum of latents, largest score and sum of weights of a tile over one run, undivided."""
    n_tiles: tl.constexpr = (N_HEADS + LANES - 1) // LANES
    place = tl.program_id(0) // n_tiles  # of the row among those of this launch
    row = first_row + place
    span, run = _span_of(row, starts_at, n_spans, SPANS), tl.program_id(1)
    if span < n_spans:
        position = tl.load(past_at + span) + row - tl.load(starts_at + span)
        if run * RUN <= position:
            head = tl.program_id(0) % n_tiles * LANES + tl.arange(0, LANES)
            i, j, p = tl.arange(0, SIZE), tl.arange(0, SIZE_ROPE), tl.arange(0, STEP)
            lane = row.to(tl.int64) * N_HEADS + head
            there = head < N_HEADS
            like = q_at.dtype.element_ty
            q = tl.load(
                q_at + lane[:, None] * D_LATENT + i[None, :],
                mask=there[:, None] & (i < D_LATENT)[None, :],
                other=0.0,
            )
            q_rope = tl.load(
                q_rope_at + lane[:, None] * D_ROPE + j[None, :],
                mask=there[:, None] & (j < D_ROPE)[None, :],
                other=0.0,
            )
            largest = tl.full([LANES], float("-inf"), tl.float32)
            weight = tl.zeros([LANES], tl.float32)
            total = tl.zeros([LANES, SIZE], tl.float32)
            for block in range(run * RUN, tl.minimum((run + 1) * RUN, position + 1), STEP):
                seen = block + p <= position
                page = tl.load(
                    table_at + span.to(tl.int64) * n_pages + (block + p) // PAGE_SIZE, mask=seen, other=0
                )
                cell = page.to(tl.int64) * PAGE_SIZE + (block + p) % PAGE_SIZE
                at = latents_at + cell[:, None] * (D_LATENT + D_ROPE)
                latent = tl.load(at + i[None, :], mask=seen[:, None] & (i < D_LATENT)[None, :], other=0)
                key = tl.load(at + D_LATENT + j[None, :], mask=seen[:, None] & (j < D_ROPE)[None, :], other=0)
                latent, key = _values(latent, like), _values(key, like)
                scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
                scores = tl.dot(q_rope, tl.trans(key), scores, input_precision="ieee") * scale
                scores = tl.where(seen[None, :], scores, float("-inf"))
                larger = tl.maximum(largest, tl.max(scores, 1))
                weights = tl.exp2(scores - larger[:, None])
                factor = tl.exp2(largest - larger)
                weight = weight * factor + tl.sum(weights, 1)
                total = tl.dot(weights.to(like), latent, total * factor[:, None], input_precision="ieee")
                largest = larger
            kept = (place.to(tl.int64) * N_HEADS + head) * n_runs + run
            tl.store(
                sums_at + kept[:, None] * D_LATENT + i[None, :],
                total,
                mask=there[:, None] & (i < D_LATENT)[None, :],
            )
            tl.store(softmax_at + 2 * kept, largest, mask=there)
            tl.store(softmax_at + 2 * kept + 1, weight, mask=there)


@triton.jit(do_not_specialize=["first_row", "n_spans", "n_runs"])
def _join(
    sums_at,
    softmax_at,
    starts_at,
    past_at,
    out_at,
    first_row,
    n_spans,
    n_runs,
    N_HEADS: tl.constexpr,
    D_LATENT: tl.constexpr,
    SUMS: tl.constexpr,
    RUN: tl.constexpr,
    SPANS: tl.constexpr,
):
    """The runs of one head of one row, in ascending order, divided by all weights."""
    place = tl.program_id(0).to(tl.int64)  # row among those of this launch, then head
    row = first_row + place // N_HEADS
    span = _span_of(row, starts_at, n_spans, SPANS)
    if span < n_spans:
        position = tl.load(past_at + span) + row - tl.load(starts_at + span)
        n_seen = position // RUN + 1
        i = tl.program_id(1) * SUMS + tl.arange(0, SUMS)
        at = place * n_runs
        largest = tl.load(softmax_at + 2 * at)
        for run in range(1, n_seen):
            largest = tl.maximum(largest, tl.load(softmax_at + 2 * (at + run)))
        weight, total = 0.0, tl.zeros([SUMS], tl.float32)
        for run in range(n_seen):
            factor = tl.exp2(tl.load(softmax_at + 2 * (at + run)) - largest)
            weight += factor * tl.load(softmax_at + 2 * (at + run) + 1)
            total += factor * tl.load(sums_at + (at + run) * D_LATENT + i, mask=i < D_LATENT, other=0.0)
        target = out_at + (row * N_HEADS + place % N_HEADS) * D_LATENT + i
        tl.store(target, (total / weight).to(out_at.dtype.element_ty), mask=i < D_LATENT)
