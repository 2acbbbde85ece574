"""Definition of `short_conv` in plain torch: float32 inside, float64 for float64."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.short_conv.state import ConvState


def short_conv(x: Tensor, weight: Tensor, state: ConvState, spans: RecurrentRows) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    starts, parks = spans.span_starts.tolist(), spans.park_rows.tolist()
    for i in range(spans.slot_ids.shape[0]):
        rows = range(starts[i], starts[i + 1])
        inputs = torch.cat([_before(state, spans, i), x[rows.start : rows.stop]])
        for j, row in enumerate(rows, start=inputs.shape[0] - len(rows)):
            out[row] = _one(inputs[j + 1 - weight.shape[1] : j + 1], weight)
            if parks[row] >= 0:
                state.parked[parks[row]] = x[row]
        _store(state, spans, i, inputs)
    return out


def settle_windows(window: Tensor, state: ConvState, spans: RecurrentRows) -> None:
    for i in range(spans.slot_ids.shape[0]):
        _store(state, spans, i, _before(state, spans, i))


def _before(
    state: ConvState, spans: RecurrentRows, i: int
) -> Tensor:  # [width - 1 + n_history, n_channels], a copy
    """What span i reads before its own rows."""
    history = spans.history_rows[int(spans.history_starts[i]) : int(spans.history_starts[i + 1])]
    return torch.cat([state.window[int(spans.slot_ids[i])], state.parked[history.long()]])


def _store(
    state: ConvState,
    spans: RecurrentRows,
    i: int,
    inputs: Tensor,  # [width - 1 + n_updates, n_channels]
) -> None:
    """The slot's window is what the update after the settled ones would read."""
    n_settled, n_kept = int(spans.n_settled[i]), state.window.shape[1]
    state.window[int(spans.slot_ids[i])] = inputs[n_settled : n_settled + n_kept]


def _one(
    inputs: Tensor,  # [width, n_channels]
    weight: Tensor,  # [n_channels, width]
) -> Tensor:  # [n_channels]
    wide = torch.promote_types(inputs.dtype, torch.float32)
    total = torch.zeros_like(inputs[0], dtype=wide)
    for one, column in zip(inputs.to(wide), weight.to(wide).T, strict=True):
        total = total + one * column
    return torch.nn.functional.silu(total).to(inputs.dtype)
