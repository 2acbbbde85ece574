"""Experts in Triton: pairs of a row and an expert sorted by expert on the device, then one product per tile of pairs.

The host never learns which experts are touched. It starts as many tiles as there can be; a tile beyond the last
returns at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.gated.triton import gated
from slipstream.kernels.moe.reference import PlainExperts
from slipstream.kernels.moe.triton_route import route as route
from slipstream.kernels.moe.types import (
    ExpertBiases,
    ExpertMatrices,
    PackedExperts,
    Routed,
    stacked,
)
from slipstream.kernels.triton_launch import FUSED, aligned, power_of_two, tiles
from slipstream.kernels.triton_launch import refuses as refuses

PAIRS = 64  # rows of a product's tile
# (outputs of a product's tile, inputs of a step): in float32, which no tensor core multiplies, more of them spill.
WIDE, NARROW = (16, 16), (32, 64)
IDS = 1024  # expert ids looked at together
SUMS = 512  # elements of a program that adds up


class DeviceExperts(PlainExperts):
    """Plain experts that start on 16 bytes, as the kernels read them."""

    __slots__ = ()


class _Tiles(NamedTuple):
    """Pairs, numbered row * top_k + place, in order of experts, then of rows; and their tiles."""

    pairs: Tensor  # [n_pairs] int32
    experts: Tensor  # [n_tiles] int32: -1 beyond the last tile
    firsts: Tensor  # [n_tiles] int32: where in `pairs` a tile begins
    ends: Tensor  # [n_tiles] int32: and where the tile's expert ends


def pack_experts(
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
) -> PackedExperts:
    if biases is not None:
        biases = ExpertBiases(biases.gate_up.contiguous(), biases.down.contiguous())
    return DeviceExperts(aligned(stacked(gate_up)), aligned(stacked(down)), biases, activation)


def experts(x: Tensor, routed: Routed, packed: PackedExperts) -> Tensor:
    if not isinstance(packed, DeviceExperts):
        raise TypeError(f"triton experts got {type(packed).__name__}; pack them with triton too")
    (n_rows, d_model), top_k = x.shape, routed.expert_ids.shape[1]
    x, out = aligned(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    if n_rows == 0:
        return out
    n_pairs, d_inner = n_rows * top_k, packed.down.shape[2]
    sorted_pairs = _sort(routed.expert_ids.contiguous(), packed.n_experts)
    inner = x.new_empty((n_pairs, d_inner))
    said = torch.empty((n_pairs, d_model), dtype=torch.float32, device=x.device)
    columns, depth = WIDE if x.dtype == torch.float32 else NARROW
    n_tiles = sorted_pairs.experts.shape[0]
    fixed = {"num_warps": 4, "num_stages": 4, **FUSED}
    biases = packed.biases or ExpertBiases(packed.gate_up, packed.down)  # not read
    sizes = PAIRS, columns, depth, packed.biases is not None
    _gate_up[n_tiles, tiles(d_inner, columns)](
        *(x, packed.gate_up, biases.gate_up, inner, *sorted_pairs),
        *(top_k, d_model, d_inner, *sizes, *packed.activation),
        **fixed,
    )
    _down[n_tiles, tiles(d_model, columns)](
        *(inner, packed.down, biases.down, said, *sorted_pairs, d_inner, d_model, *sizes), **fixed
    )
    weights = routed.weights.contiguous()
    _add_up[n_rows, tiles(d_model, SUMS)](said, weights, out, top_k, d_model, SUMS, num_warps=4, **FUSED)
    return out


def _sort(expert_ids: Tensor, n_experts: int) -> _Tiles:
    n_pairs = expert_ids.numel()
    # Never more: each expert begins one, the rest are full.
    n_tiles = min(n_pairs, n_experts) + n_pairs // PAIRS
    new = expert_ids.new_empty
    sorted_pairs = _Tiles(new(n_pairs), new(n_tiles), new(n_tiles), new(n_tiles))
    _sort_pairs[(n_experts,)](
        *(expert_ids, *sorted_pairs, n_pairs, n_tiles),
        *(n_experts, power_of_two(n_experts), IDS, PAIRS),
        num_warps=4,
        **FUSED,
    )
    return sorted_pairs


@triton.jit(do_not_specialize=["n_pairs", "n_tiles"])
def _sort_pairs(
    ids_at,
    pairs_at,
    experts_at,
    firsts_at,
    ends_at,
    n_pairs,
    n_tiles,
    N_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    IDS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One expert's pairs and tiles. Every program counts all experts, which spares a launch."""
    own, bins = tl.program_id(0), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for block in range(0, n_pairs, IDS):
        i = block + tl.arange(0, IDS)
        ids = tl.load(ids_at + i, mask=i < n_pairs, other=0)
        counts += tl.histogram(ids, BINS, mask=i < n_pairs)
    n_tiles_of = (counts + (PAIRS - 1)) // PAIRS  # [BINS]
    first = tl.sum(tl.where(bins < own, counts, 0), 0)
    end = first + tl.sum(tl.where(bins == own, counts, 0), 0)
    tile = tl.sum(tl.where(bins < own, n_tiles_of, 0), 0)

    n_before = first
    for block in range(0, n_pairs, IDS):
        i = block + tl.arange(0, IDS)
        mine = (tl.load(ids_at + i, mask=i < n_pairs, other=-1) == own).to(tl.int32)  # [IDS]
        place = n_before + tl.cumsum(mine, 0) - 1
        tl.store(pairs_at + place, i, mask=mine > 0)
        n_before += tl.sum(mine, 0)

    for at in range(first, end, PAIRS):
        here = tile + (at - first) // PAIRS
        tl.store(experts_at + here, own)
        tl.store(firsts_at + here, at)
        tl.store(ends_at + here, end)
    if own == N_EXPERTS - 1:
        for here in range(tl.sum(n_tiles_of, 0), n_tiles):
            tl.store(experts_at + here, -1)


@triton.jit
def _load_pairs(pairs_at, firsts_at, ends_at, tile, PAIRS: tl.constexpr):
    """A tile's pairs, [PAIRS] int64, and which of them there are."""
    i = tl.load(firsts_at + tile) + tl.arange(0, PAIRS)
    there = i < tl.load(ends_at + tile)
    return tl.load(pairs_at + i, mask=there, other=0).to(tl.int64), there


@triton.jit
def _gate_up(
    x_at,
    weight_at,
    bias_at,
    inner_at,
    pairs_at,
    experts_at,
    firsts_at,
    ends_at,
    TOP_K: tl.constexpr,
    D_IN: tl.constexpr,
    D_INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    FORM: tl.constexpr,
    LIMIT: tl.constexpr,
    STEEPNESS: tl.constexpr,
):
    """The activation of a tile of pairs, gate and up rounded to the rows' dtype first. FORM: as in `_form`."""
    tile = tl.program_id(0)
    expert = tl.load(experts_at + tile).to(tl.int64)
    if expert >= 0:
        pairs, there = _load_pairs(pairs_at, firsts_at, ends_at, tile, PAIRS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        exists = column < D_INNER
        rows_at = x_at + (pairs // TOP_K)[:, None] * D_IN + k[None, :]  # [PAIRS, DEPTH]
        output = (expert * (2 * D_INNER) + column)[None, :]
        gates_at = weight_at + output * D_IN + k[:, None]  # [DEPTH, COLUMNS]
        gate = tl.zeros([PAIRS, COLUMNS], tl.float32)
        up = tl.zeros([PAIRS, COLUMNS], tl.float32)
        for at in range(0, D_IN, DEPTH):
            inside = k < D_IN - at
            rows = tl.load(rows_at + at, mask=there[:, None] & inside[None, :], other=0.0)
            wanted = exists[None, :] & inside[:, None]
            gate = tl.dot(rows, tl.load(gates_at + at, mask=wanted, other=0.0), gate, input_precision="ieee")
            ups = tl.load(gates_at + (D_INNER * D_IN) + at, mask=wanted, other=0.0)
            up = tl.dot(rows, ups, up, input_precision="ieee")
        if BIASED:
            these_at = bias_at + expert * (2 * D_INNER) + column  # [COLUMNS]
            gate += tl.load(these_at, mask=exists, other=0.0).to(tl.float32)[None, :]
            up += tl.load(these_at + D_INNER, mask=exists, other=0.0).to(tl.float32)[None, :]
        kind = inner_at.dtype.element_ty
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
        inner = gated(gate, up, FORM, LIMIT, STEEPNESS)
        target = inner_at + pairs[:, None] * D_INNER + column[None, :]
        tl.store(target, inner.to(kind), mask=there[:, None] & exists[None, :])


@triton.jit
def _down(
    inner_at,
    weight_at,
    bias_at,
    said_at,
    pairs_at,
    experts_at,
    firsts_at,
    ends_at,
    D_IN: tl.constexpr,
    D_OUT: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
):
    """What an expert says to a tile of pairs, in float32."""
    tile = tl.program_id(0)
    expert = tl.load(experts_at + tile).to(tl.int64)
    if expert >= 0:
        pairs, there = _load_pairs(pairs_at, firsts_at, ends_at, tile, PAIRS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        exists = column < D_OUT
        rows_at = inner_at + pairs[:, None] * D_IN + k[None, :]  # [PAIRS, DEPTH]
        weights_at = weight_at + (expert * D_OUT + column)[None, :] * D_IN + k[:, None]  # [DEPTH, COLUMNS]
        said = tl.zeros([PAIRS, COLUMNS], tl.float32)
        for at in range(0, D_IN, DEPTH):
            inside = k < D_IN - at
            rows = tl.load(rows_at + at, mask=there[:, None] & inside[None, :], other=0.0)
            weights = tl.load(weights_at + at, mask=exists[None, :] & inside[:, None], other=0.0)
            said = tl.dot(rows, weights, said, input_precision="ieee")
        if BIASED:
            these_at = bias_at + expert * D_OUT + column  # [COLUMNS]
            said += tl.load(these_at, mask=exists, other=0.0).to(tl.float32)[None, :]
        target = said_at + pairs[:, None] * D_OUT + column[None, :]
        tl.store(target, said, mask=there[:, None] & exists[None, :])


@triton.jit
def _add_up(said_at, weights_at, out_at, TOP_K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    """Per row the sum of weight * said over its experts, ascending."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = row * TOP_K + place
        said = tl.load(said_at + pair * D + i, mask=i < D, other=0.0)
        total += tl.load(weights_at + pair) * said
    tl.store(out_at + row * D + i, total.to(out_at.dtype.element_ty), mask=i < D)
