"""Multi-head latent attention in Triton: a program is some heads of one row, over a run of positions of a fixed length.

Runs of 512 positions lie at fixed places and are joined in ascending order, so that a row's bits follow from its
position and the latents alone. Sums of runs are kept in float32 between two launches, of some rows at a time.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention.spans import Spans
from slipstream.kernels.mla.latent_types import check_latents
from slipstream.kernels.mla.triton_rows import as_codes
from slipstream.kernels.mla.triton_rows import head_linear as head_linear
from slipstream.kernels.mla.triton_rows import pack_heads as pack_heads
from slipstream.kernels.mla.triton_rows import write_latents as write_latents
from slipstream.kernels.triton_launch import FUSED, ROUNDED, aligned, power_of_two, span_of, tiles
from slipstream.kernels.triton_launch import refuses as refuses

RUN = 512  # positions of a program
STEP = 16  # positions of a product
LANES = 16  # heads of a program: the least rows of a tensor core's product
SPANS = 128  # ends of spans looked at together
SUMS = 512  # elements of a program that joins runs
MOST_SUMS = 1 << 26  # floats kept between the two launches


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
    # With two, float32 spills on compute capability 8.6 and 8.9.
    stages = 1 if q.dtype == torch.float32 else 2
    for first in range(0, n_rows, n_at_once):
        n = min(n_at_once, n_rows - first)
        _attend[n * tiles(n_heads, LANES), n_runs](
            *(q, q_rope, as_codes(latents), *batch, sums, softmax, first, n_spans, n_pages, n_runs),
            *(scale * math.log2(math.e), *sizes, d_rope, latents.shape[1]),
            *(power_of_two(d_latent), power_of_two(d_rope), LANES, STEP, RUN, SPANS),
            num_warps=8,
            num_stages=stages,
            **FUSED,
        )
        _join[n * n_heads, tiles(d_latent, SUMS)](
            *(sums, softmax, batch[0], batch[1], out, first, n_spans, n_runs, *sizes, SUMS, RUN, SPANS),
            num_warps=4,
            **ROUNDED,
        )
    return out


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


@triton.jit
def _sum_run(
    q,
    q_rope,
    latents_at,
    table_at,
    first,
    end,
    scale,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_ROPE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Weighted sum of latents first … end - 1, [LANES, SIZE], the largest score and the sum of weights, [LANES]."""
    i, j, p = tl.arange(0, SIZE), tl.arange(0, SIZE_ROPE), tl.arange(0, STEP)
    like = q.dtype
    largest = tl.full([LANES], float("-inf"), tl.float32)
    weight = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES, SIZE], tl.float32)
    for block in range(first, end, STEP):
        seen = block + p < end
        page = tl.load(table_at + (block + p) // PAGE_SIZE, mask=seen, other=0)
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
    return total, largest, weight


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
    span, run = span_of(starts_at, n_spans, row, SPANS), tl.program_id(1)
    if span < n_spans:
        position = tl.load(past_at + span) + row - tl.load(starts_at + span)
        if run * RUN <= position:
            head = tl.program_id(0) % n_tiles * LANES + tl.arange(0, LANES)
            i, j = tl.arange(0, SIZE), tl.arange(0, SIZE_ROPE)
            lane = row.to(tl.int64) * N_HEADS + head
            there = head < N_HEADS
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
            run_end = tl.minimum((run + 1) * RUN, position + 1)
            total, largest, weight = _sum_run(
                *(q, q_rope, latents_at, table_at + span.to(tl.int64) * n_pages, run * RUN, run_end, scale),
                *(D_LATENT, D_ROPE, PAGE_SIZE, LANES, SIZE, SIZE_ROPE, STEP),
            )
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
    span = span_of(starts_at, n_spans, row, SPANS)
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
