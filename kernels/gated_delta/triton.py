"""The gated delta rule in Triton: token by token, the state in registers from its one reading to its one writing.

Two launches. The first prepares every update by itself: keys and decays of histories are gathered, those of rows
normalised, into vectors of float32. The second has one program per span, value head and block of columns of the
state. It reads nothing else that a span may park over, except its own columns of deltas.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gated_delta import reference
from slipstream.kernels.gated_delta.spans import RecurrentSpans, parts_of
from slipstream.kernels.gated_delta.state import DeltaGate, DeltaState
from slipstream.kernels.gated_delta.triton_columns import advance_columns
from slipstream.kernels.triton_launch import FUSED, ROUNDED, aligned, power_of_two, tiles
from slipstream.kernels.triton_launch import refuses as refuses

COLUMNS = 8  # of the state, in a program
CHUNK = 16  # rows of the state in one variable of a program
EPS = tl.constexpr(1e-6)  # added to a sum of squares


class _Updates(NamedTuple):
    """What updates need besides the state, first all histories', then all rows'. float32."""

    keys: Tensor  # [n_history + n_rows, n_key_heads, d_key]
    queries: Tensor  # [n_rows, n_key_heads, d_key]
    decays: Tensor  # [n_history + n_rows, n_value_heads] or [n_history + n_rows, n_value_heads, d_key]
    betas: Tensor  # [n_rows, n_value_heads]


def gated_delta(
    mixed: Tensor,
    raw_decay: Tensor,
    raw_beta: Tensor,
    gate: DeltaGate,
    state: DeltaState,
    spans: RecurrentSpans,
) -> Tensor:
    n_value_heads, d_value = state.parked_deltas.shape[1:]
    if not raw_decay.shape[1:] == gate.dt_bias.shape == state.parked_decays.shape[1:]:
        raise ValueError("raw_decay, dt_bias and parked_decays disagree on what decays by itself")
    parts = _checked(state, spans)
    mixed, raw_decay, raw_beta = aligned(mixed), aligned(raw_decay), aligned(raw_beta)
    out = torch.empty((mixed.shape[0], n_value_heads, d_value), dtype=mixed.dtype, device=mixed.device)
    updates = _prepare((mixed, raw_decay, raw_beta), gate, state, spans)
    _advance(mixed, out, updates, state, parts)
    return out


def settle_states(states: Tensor, state: DeltaState, spans: RecurrentSpans) -> None:
    if states.dtype != torch.float32:
        reference.settle_states(states, state, spans)  # float64: the same operations
        return
    parts = _checked(state, spans)
    none = states.new_empty((0, 0))  # no rows: neither these nor their kin are read
    updates = _prepare((none, none, none), DeltaGate(states, states), state, spans)
    _advance(none, none, updates, state, parts)


def _checked(state: DeltaState, spans: RecurrentSpans) -> tuple[Tensor, ...]:
    """The parts of `spans` as kernels take them. Raises ValueError for tensors they could not read."""
    states = state.state, state.parked_keys, state.parked_deltas, state.parked_decays
    if not all(x.dtype == torch.float32 and x.is_contiguous() for x in states):
        raise ValueError("states and records are contiguous float32")
    return parts_of(spans)


def _sizes(state: DeltaState) -> tuple[int, int, int, int, bool]:
    """(n_key_heads, n_value_heads, d_key, d_value, whether every key dimension decays by itself)."""
    n_key_heads, d_key = state.parked_keys.shape[1:]
    n_value_heads, d_value = state.parked_deltas.shape[1:]
    return n_key_heads, n_value_heads, d_key, d_value, state.parked_decays.dim() == 3


def _prepare(
    rows: tuple[Tensor, Tensor, Tensor], gate: DeltaGate, state: DeltaState, spans: RecurrentSpans
) -> _Updates:
    """rows: (mixed, raw_decay, raw_beta)."""
    n_key_heads, n_value_heads, d_key, d_value, per_key = _sizes(state)
    n_history, n_rows = spans.history_rows.shape[0], rows[0].shape[0]
    new, n_updates = state.parked_keys.new_empty, n_history + n_rows
    updates = _Updates(
        keys=new((n_updates, n_key_heads, d_key)),
        queries=new((n_rows, n_key_heads, d_key)),
        decays=new((n_updates, *state.parked_decays.shape[1:])),
        betas=new((n_rows, n_value_heads)),
    )
    if n_updates > 0:
        group = n_value_heads // n_key_heads
        _one_update[n_updates, n_key_heads](
            *(*rows, gate.a_log.contiguous(), gate.dt_bias.contiguous()),
            *(state.parked_keys, state.parked_decays, spans.history_rows),
            *updates,
            *(n_history, n_key_heads, n_value_heads, d_key, d_value, d_key**-0.5),
            *(power_of_two(d_key), power_of_two(group), per_key),
            num_warps=1,
            **FUSED,
        )
    return updates


def _advance(
    mixed: Tensor, out: Tensor, updates: _Updates, state: DeltaState, parts: tuple[Tensor, ...]
) -> None:
    """parts: of the pass's `RecurrentSpans`, as `parts_of` gives them."""
    n_key_heads, n_value_heads, d_key, d_value, per_key = _sizes(state)
    n_spans, n_history = parts[1].shape[0], parts[3].shape[0]
    if n_spans > 0:
        pools = state.state, state.parked_keys, state.parked_deltas, state.parked_decays
        advance_columns[tiles(d_value, COLUMNS), n_value_heads, n_spans](
            *(mixed, out, *updates, *pools, *parts),
            *(n_history, n_key_heads, n_value_heads, d_key, d_value),
            *(tiles(d_key, CHUNK), CHUNK, COLUMNS, per_key),
            num_warps=1,
            **ROUNDED,  # an update is the definition's, whatever applies it: a row, a fold, another implementation
        )


@triton.jit
def _softplus(x):
    """log(1 + e^x) as max(x, 0) + 2 atanh(u / (2 + u)) with u = e^-|x|, which keeps its digits where it is tiny."""
    u = tl.exp(-tl.abs(x))
    z = u / (2.0 + u)
    square = z * z
    # 1 + z²/3 + z⁴/5 + …: atanh(z) / z within 2e-9 for z <= 1/3
    total = tl.fma(square, 1.0 / 15, 1.0 / 13)
    total = tl.fma(total, square, 1.0 / 11)
    total = tl.fma(total, square, 1.0 / 9)
    total = tl.fma(total, square, 1.0 / 7)
    total = tl.fma(total, square, 1.0 / 5)
    total = tl.fma(total, square, 1.0 / 3)
    total = tl.fma(total, square, 1.0)
    return tl.maximum(x, 0.0) + 2.0 * z * total


# fmt: off
@triton.jit(do_not_specialize=["n_history"])
def _one_update(
    mixed_at, raw_decay_at, raw_beta_at, a_log_at, dt_bias_at, parked_keys_at, parked_decays_at, history_at,
    keys_at, queries_at, decays_at, betas_at, n_history, N_KEY: tl.constexpr, N_VALUE: tl.constexpr,
    D_KEY: tl.constexpr, D_VALUE: tl.constexpr, scale, SIZE: tl.constexpr, GROUP: tl.constexpr,
    PER_KEY: tl.constexpr,
):
    # fmt: on
    """Vectors of one update under one key head; GROUP: its value heads, rounded up to a power of two."""
    update, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, SIZE)
    inside = i < D_KEY
    member = tl.arange(0, GROUP)
    head = key_head * (N_VALUE // N_KEY) + member  # [GROUP]
    exists = member < N_VALUE // N_KEY
    if PER_KEY:
        place = head[:, None] * D_KEY + i[None, :]  # [GROUP, SIZE]
        decaying = exists[:, None] & inside[None, :]
        N_DECAYS: tl.constexpr = N_VALUE * D_KEY
    else:
        place = head
        decaying = exists
        N_DECAYS: tl.constexpr = N_VALUE
    key_place = update * (N_KEY * D_KEY) + key_head * D_KEY + i
    if update < n_history:
        parked = tl.load(history_at + update).to(tl.int64)
        key = tl.load(parked_keys_at + (parked * N_KEY + key_head) * D_KEY + i, mask=inside)
        tl.store(keys_at + key_place, key, mask=inside)
        decay = tl.load(parked_decays_at + parked * N_DECAYS + place, mask=decaying)
        tl.store(decays_at + update * N_DECAYS + place, decay, mask=decaying)
    else:
        row = update - n_history
        heads_at = mixed_at + row * (2 * N_KEY * D_KEY + N_VALUE * D_VALUE) + key_head * D_KEY + i
        query = tl.load(heads_at, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(heads_at + N_KEY * D_KEY, mask=inside, other=0.0).to(tl.float32)
        query = query * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(query * query, 0) + EPS)) * scale
        key = key * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(key * key, 0) + EPS))
        tl.store(queries_at + (row * N_KEY + key_head) * D_KEY + i, query, mask=inside)
        tl.store(keys_at + key_place, key, mask=inside)
        raw = tl.load(raw_decay_at + row * N_DECAYS + place, mask=decaying, other=0.0).to(tl.float32)
        step = _softplus(raw + tl.load(dt_bias_at + place, mask=decaying, other=0.0))
        rate = tl.exp(tl.load(a_log_at + head, mask=exists, other=0.0))  # [GROUP]
        if PER_KEY:
            decay = tl.exp(-rate[:, None] * step)
        else:
            decay = tl.exp(-rate * step)
        tl.store(decays_at + update * N_DECAYS + place, decay, mask=decaying)
        raw_beta = tl.load(raw_beta_at + row * N_VALUE + head, mask=exists, other=0.0).to(tl.float32)
        tl.store(betas_at + row * N_VALUE + head, 1.0 / (1.0 + tl.exp(-raw_beta)), mask=exists)
