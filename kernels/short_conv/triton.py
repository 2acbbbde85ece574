"""Short convolution in Triton: all rows at once, then every span moves its window and parks.

Two launches, because a window and a history are read by many programs and may be overwritten by their own span.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gated.triton import over_one_plus_exp
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.short_conv.state import ConvState
from slipstream.kernels.triton_launch import FUSED, begin, early, span_of, tiles
from slipstream.kernels.triton_launch import refuses as refuses

TILE = 512  # channels of a program
SPANS = 64  # span starts looked at together
PARKS = 64  # park rows looked at together


def short_conv(x: Tensor, weight: Tensor, state: ConvState, spans: RecurrentRows) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    if weight.dtype != x.dtype or weight.shape != (x.shape[1], state.window.shape[1] + 1):
        raise ValueError("weight must be [n_channels, width] of x's dtype, width one more than the window's")
    state.check(x.dtype)
    batch = spans.checked()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (n_rows, n_channels), n_spans = x.shape, spans.slot_ids.shape[0]
    if out.numel() > 0 and n_spans > 0:
        sizes = x.stride(0), n_channels, weight.shape[1], TILE
        _convolve[n_rows, tiles(n_channels, TILE)](
            *(x, weight, out, state.window, state.parked, *batch[:4]),
            *(n_spans, *weight.stride(), *sizes, SPANS),
            num_warps=4,
            **early(x.device),
            **FUSED,
        )
    _keep_inputs(x, x.stride(0), state, batch)
    return out


def settle_windows(window: Tensor, state: ConvState, spans: RecurrentRows) -> None:
    state.check(window.dtype)
    _keep_inputs(window, 0, state, spans.checked())  # without rows the first is not read


def _keep_inputs(x: Tensor, stride: int, state: ConvState, batch: tuple[Tensor, ...]) -> None:
    """Move the windows, then park. stride: elements from row to row of x."""
    n_spans, (_, n_window, n_channels) = batch[1].shape[0], state.window.shape
    if n_spans > 0 and n_channels > 0:
        _keep[n_spans, tiles(n_channels, TILE)](
            *(x, state.window, state.parked, *batch),
            *(stride, n_channels, n_window + 1, TILE, PARKS),
            num_warps=4,
            **early(x.device),
            **FUSED,
        )


@triton.jit
def _input(
    x_at,
    window_at,
    parked_at,
    history_at,
    t,
    n_history,
    STRIDE: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Where input t of a span lies. x_at, window_at, history_at: the span's own rows, window and history."""
    in_window = t < W - 1
    in_history = (t >= W - 1) & (t < W - 1 + n_history)
    row = tl.load(history_at + (t - (W - 1)), mask=in_history, other=0).to(tl.int64)
    own = x_at + (t - (W - 1) - n_history).to(tl.int64) * STRIDE
    return tl.where(in_window, window_at + t * N, tl.where(in_history, parked_at + row * N, own))


@triton.jit(do_not_specialize=["n_spans"])
def _convolve(
    x_at,
    weight_at,
    out_at,
    window_at,
    parked_at,
    starts_at,
    slots_at,
    history_starts_at,
    history_at,
    n_spans,
    W_CHANNEL: tl.constexpr,
    W_TIME: tl.constexpr,
    STRIDE: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    SPANS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row's outputs for SIZE channels. W_CHANNEL, W_TIME: strides of the weight."""
    row = tl.program_id(0)
    c = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    span = span_of(starts_at, n_spans, row, SPANS)
    some = span < n_spans
    first = tl.load(starts_at + span, mask=some, other=0)
    oldest = tl.load(history_starts_at + span, mask=some, other=0)
    n_history = tl.load(history_starts_at + span + 1, mask=some, other=0) - oldest
    slot = tl.load(slots_at + span, mask=some, other=0).to(tl.int64)
    begin(EARLY)  # what describes the pass is read before
    if some:
        rows_at = x_at + first.to(tl.int64) * STRIDE
        slot_at = window_at + slot * ((W - 1) * N)
        total = tl.zeros([SIZE], tl.float32)
        for j in tl.static_range(W):
            t = n_history + row - first + j
            at = _input(rows_at, slot_at, parked_at, history_at + oldest, t, n_history, STRIDE, N, W)
            one = tl.load(at + c, mask=c < N, other=0.0).to(tl.float32)  # [SIZE]
            weight = tl.load(weight_at + c * W_CHANNEL + j * W_TIME, mask=c < N, other=0.0).to(tl.float32)
            total = tl.fma(one, weight, total)
        out = over_one_plus_exp(total, total).to(out_at.dtype.element_ty)
        tl.store(out_at + row.to(tl.int64) * N + c, out, mask=c < N)


@triton.jit
def _keep(
    x_at,
    window_at,
    parked_at,
    starts_at,
    slots_at,
    history_starts_at,
    history_at,
    settled_at,
    parks_at,
    STRIDE: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    PARKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One span's window and parked rows, SIZE channels. A window moves from its oldest input on, so none is lost."""
    span = tl.program_id(0)
    c = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    first, end = tl.load(starts_at + span), tl.load(starts_at + span + 1)
    oldest = tl.load(history_starts_at + span)
    n_history = tl.load(history_starts_at + span + 1) - oldest
    rows_at = x_at + first.to(tl.int64) * STRIDE
    slot_at = window_at + tl.load(slots_at + span).to(tl.int64) * ((W - 1) * N)
    n_settled = tl.load(settled_at + span)
    begin(EARLY)  # what describes the pass is read before
    if n_settled > 0:
        for t in tl.static_range(W - 1):
            at = _input(
                rows_at, slot_at, parked_at, history_at + oldest, n_settled + t, n_history, STRIDE, N, W
            )
            one = tl.load(at + c, mask=c < N)  # [SIZE]
            tl.debug_barrier()  # a place is read by all of the program before any of it writes there
            tl.store(slot_at + t * N + c, one, mask=c < N)
    tl.debug_barrier()
    for block in range(first, end, PARKS):
        i = block + tl.arange(0, PARKS)
        if tl.max(tl.load(parks_at + i, mask=i < end, other=-1), 0) >= 0:  # else nothing to do for a prompt
            for row in range(block, tl.minimum(block + PARKS, end)):
                park = tl.load(parks_at + row).to(tl.int64)
                if park >= 0:
                    one = tl.load(rows_at + (row - first).to(tl.int64) * STRIDE + c, mask=c < N)
                    tl.store(parked_at + park * N + c, one, mask=c < N)
