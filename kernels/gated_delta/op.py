"""The gated delta rule over the ragged rows of a pass. Prefill, decoding and verification are one case."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.dispatch import op
from slipstream.kernels.gated_delta.spans import RecurrentRows as RecurrentRows
from slipstream.kernels.gated_delta.state import DeltaGate as DeltaGate
from slipstream.kernels.gated_delta.state import DeltaState as DeltaState


@op("cuda", "cpu", "reference")
def gated_delta(
    mixed: Tensor,
    raw_decay: Tensor,
    raw_beta: Tensor,
    gate: DeltaGate,
    state: DeltaState,
    spans: RecurrentRows,
) -> Tensor:
    """Per row and value head, on the slot's state S [d_key, d_value]:

        S ← e^g S;  delta = sigmoid(raw_beta) * (v - Sᵀk);  S ← S + k ⊗ delta;  o = Sᵀq

    with k = key / sqrt(Σ key² + 1e-6), q = query / sqrt(Σ query² + 1e-6) / sqrt(d_key) and
    g = -exp(a_log) * softplus(raw_decay + dt_bias). Value head h reads key head h // (n_value_heads / n_key_heads).
    Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024); with a decay per key dimension, Kimi Delta Attention (2025).

    mixed: [n_rows, 2 * n_key_heads * d_key + n_value_heads * d_value], all queries, all keys, all values.
    raw_decay: [n_rows, n_value_heads], or [n_rows, n_value_heads, d_key] (KDA). raw_beta: [n_rows, n_value_heads].
    Both float32 or mixed's dtype. Returns o [n_rows, n_value_heads, d_value], rounded once to mixed's dtype, which is
    where Hugging Face transformers rounds it as well (it also rounds sigmoid(raw_beta) to that dtype; here
    everything before o is float32, or float64 for float64).

    Changes `state` in place: histories are applied first, states take in their first n_settled updates, rows with a
    place in park_rows leave their record there. Applying a record is the same operations in the same order as the
    update that made it, so a state has the same bits whether its tokens were fed at once, in several passes, or
    parked and folded later.
    """
    raise NotImplementedError


@op("cuda", "cpu", "reference", any_dtype=True)
def settle_states(states: Tensor, state: DeltaState, spans: RecurrentRows) -> None:
    """`settle`, with state.state first for the choice of implementation. All give the same bits."""
    raise NotImplementedError


def settle(state: DeltaState, spans: RecurrentRows) -> None:
    """Apply the first n_settled parked rows of every span's history to the stored states, in place.

    `spans` has no rows of its own: span_starts is all 0, and no n_settled exceeds its span's history.
    """
    settle_states(state.state, state, spans)
