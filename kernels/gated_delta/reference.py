"""Definition of `gated_delta` in plain torch: token by token, all heads at once.

Every row is prepared by itself, in tensors whose shapes do not depend on the pass: torch's functions give other bits
at other sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.gated_delta.state import DeltaGate, DeltaState

EPS = 1e-6  # added to a sum of squares


@dataclass(frozen=True, slots=True)
class _Record:
    """What one update does to the states of a slot."""

    key: Tensor  # [n_key_heads, d_key]
    delta: Tensor  # [n_value_heads, d_value]
    decay: Tensor  # [n_value_heads] or [n_value_heads, d_key]


def gated_delta(
    mixed: Tensor,
    raw_decay: Tensor,
    raw_beta: Tensor,
    gate: DeltaGate,
    state: DeltaState,
    spans: RecurrentRows,
) -> Tensor:
    n_rows, (n_value_heads, d_value) = mixed.shape[0], state.parked_deltas.shape[1:]
    out = torch.empty((n_rows, n_value_heads, d_value), dtype=mixed.dtype, device=mixed.device)
    starts, parks = spans.span_starts.tolist(), spans.park_rows.tolist()
    for i, slot in enumerate(spans.slot_ids.tolist()):
        n_settled = int(spans.n_settled[i])
        s, n_done = _fold(state, spans, i)
        for row in range(starts[i], starts[i + 1]):
            q, k, v = _heads(mixed[row], state)
            decay = _decay(raw_decay[row], gate, s.dtype)
            beta = raw_beta[row].to(s.dtype).sigmoid()
            decayed = _decayed(s, decay)
            predicted = (decayed * _per_value_head(k, n_value_heads)[:, :, None]).sum(1)
            record = _Record(k, beta[:, None] * (v - predicted), decay)
            s = _apply(s, record)
            out[row] = (s * _per_value_head(q, n_value_heads)[:, :, None]).sum(1).to(mixed.dtype)
            n_done += 1
            if n_done == n_settled:
                state.state[slot] = s
            if parks[row] >= 0:
                _park(state, parks[row], record)
    return out


def settle_states(states: Tensor, state: DeltaState, spans: RecurrentRows) -> None:
    for i in range(spans.slot_ids.shape[0]):
        _fold(state, spans, i)


def _fold(
    state: DeltaState, spans: RecurrentRows, i: int
) -> tuple[Tensor, int]:  # [n_value_heads, d_key, d_value]
    """The state of span i after its history and the length of that; stored if n_settled falls within."""
    slot, n_settled = int(spans.slot_ids[i]), int(spans.n_settled[i])
    history = spans.history_rows[int(spans.history_starts[i]) : int(spans.history_starts[i + 1])].tolist()
    s, n_done = state.state[slot].clone(), 0
    for row in history:
        s = _apply(s, _Record(state.parked_keys[row], state.parked_deltas[row], state.parked_decays[row]))
        n_done += 1
        if n_done == n_settled:
            state.state[slot] = s
    return s, n_done


def _apply(
    s: Tensor,  # [n_value_heads, d_key, d_value]
    record: _Record,
) -> Tensor:  # [n_value_heads, d_key, d_value]
    key = _per_value_head(record.key, s.shape[0])
    return _decayed(s, record.decay) + key[:, :, None] * record.delta[:, None, :]


def _decayed(
    s: Tensor,  # [n_value_heads, d_key, d_value]
    decay: Tensor,  # [n_value_heads] or [n_value_heads, d_key]
) -> Tensor:  # [n_value_heads, d_key, d_value]
    return s * decay.reshape(s.shape[0], -1, 1)


def _heads(
    mixed: Tensor,  # [2 * n_key_heads * d_key + n_value_heads * d_value]
    state: DeltaState,
) -> tuple[Tensor, Tensor, Tensor]:  # [n_key_heads, d_key] twice, [n_value_heads, d_value]
    """A row's query and key heads, normalised, and its value heads."""
    keys, values = state.parked_keys.shape[1:], state.parked_deltas.shape[1:]
    q, k, v = torch.split(mixed.to(state.state.dtype), [keys.numel(), keys.numel(), values.numel()])
    q, k = (x.view(keys) * torch.rsqrt(x.view(keys).square().sum(-1, keepdim=True) + EPS) for x in (q, k))
    return q * keys[1] ** -0.5, k, v.view(values)


def _decay(
    raw: Tensor,  # [n_value_heads] or [n_value_heads, d_key]
    gate: DeltaGate,
    wide: torch.dtype,
) -> Tensor:  # as raw
    rate = gate.a_log.to(wide).exp()
    steps = F.softplus(raw.to(wide) + gate.dt_bias.to(wide))
    return (-rate.reshape(-1, *[1] * (raw.dim() - 1)) * steps).exp()


def _per_value_head(
    x: Tensor,  # [n_key_heads, d_key]
    n_value_heads: int,
) -> Tensor:  # [n_value_heads, d_key]
    return x.repeat_interleave(n_value_heads // x.shape[0], 0)


def _park(state: DeltaState, row: int, record: _Record) -> None:
    state.parked_keys[row] = record.key
    state.parked_deltas[row] = record.delta
    state.parked_decays[row] = record.decay
