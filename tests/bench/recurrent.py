"""The recurrent ops, 16 key heads of 128: Qwen3.5-0.8B (16 value heads), more value heads, a decay per key (KDA)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.gated_delta.op import DeltaGate, DeltaState, gated_delta
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.gated_norm.op import gated_norm
from slipstream.kernels.short_conv.op import ConvState, short_conv

N_KEY_HEADS, D_HEAD, WIDTH, N_PARKED = 16, 128, 4, 40
Line = Callable[
    [str, Callable[[int], object], float], float
]  # name, work of the number of a set, bytes it moves
PASSES = (
    (1, 0),
    (1, 4),
    (5, 0),
    (5, 4),
    (9, 0),
    (128, 0),
)  # (rows, history); up to 9 rows all but one are drafts


def make_rows(n_rows: int, n_history: int) -> RecurrentRows:
    n_drafts = n_rows - 1 if n_rows <= 9 else 0
    parks = [-1] * (n_rows - n_drafts) + list(range(20, 20 + n_drafts))
    n_settled = n_history + n_rows - n_drafts
    arrays = RecurrentRows.arrays([1], [n_rows], [list(range(n_history))], [n_settled], parks)
    return RecurrentRows(*map(torch.from_numpy, arrays))


def recurrent(
    line: Line, random: Callable[..., Tensor], n_sets: int, n_value_heads: int, *, per_key: bool
) -> None:
    """One line per op and pass. random: tensors of the dtype that is measured."""
    decays = (n_value_heads, D_HEAD) if per_key else (n_value_heads,)
    n_channels = (2 * N_KEY_HEADS + n_value_heads) * D_HEAD
    states = [
        DeltaState(
            torch.randn(2, n_value_heads, D_HEAD, D_HEAD),
            torch.randn(N_PARKED, N_KEY_HEADS, D_HEAD) / D_HEAD**0.5,
            torch.randn(N_PARKED, n_value_heads, D_HEAD),
            torch.rand(N_PARKED, *decays),
        )
        for _ in range(n_sets)
    ]
    windows = [
        ConvState(random(2, WIDTH - 1, n_channels), random(N_PARKED, n_channels)) for _ in range(n_sets)
    ]
    weight, norm = random(WIDTH, n_channels).T, random(D_HEAD)
    gate = DeltaGate(torch.randn(n_value_heads) - 1, torch.randn(decays))
    n_bytes = 2 * 4 * n_value_heads * D_HEAD**2  # the states, read once and written once
    for n_rows, n_history in PASSES:
        rows, x = make_rows(n_rows, n_history), random(n_rows, n_channels)
        raw, beta = random(n_rows, *decays), random(n_rows, n_value_heads)
        heads, z = random(n_rows, n_value_heads, D_HEAD), random(n_rows, n_value_heads * D_HEAD)
        name = f"{n_rows} rows after {n_history} parked"

        def delta(
            one: int, x: Tensor = x, raw: Tensor = raw, beta: Tensor = beta, rows: RecurrentRows = rows
        ) -> Tensor:
            return gated_delta(x, raw, beta, gate, states[one], rows)

        line(f"gated_delta, {name}", delta, n_bytes)
        line(
            f"short_conv, {name}", lambda one, x=x, rows=rows: short_conv(x, weight, windows[one], rows), 0.0
        )
        line(f"gated_norm, {n_rows} rows", lambda _, x=heads, z=z: gated_norm(x, z, norm, 1e-6, "silu"), 0.0)
