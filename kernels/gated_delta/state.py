"""What the gated delta rule keeps between passes, and the weights of its gate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaGate:
    """Weights of the decay: log decay = -exp(a_log) * softplus(raw + dt_bias). float32."""

    a_log: Tensor  # [n_value_heads]
    # [n_value_heads], or [n_value_heads, d_key] where every key dimension decays on its own (KDA)
    dt_bias: Tensor


@dataclass(frozen=True, slots=True)
class DeltaState:
    """One layer's states by slot, and a pool of parked records. All float32 (float64 beside float64 rows).

    A record is all that an update does to a state: state ← decay * state + key ⊗ delta. `parked_decays` holds
    e^(log decay), not its logarithm. The state of a slot is zeroed by its owner when a sequence begins.
    """

    state: Tensor  # [n_slots, n_value_heads, d_key, d_value]
    parked_keys: Tensor  # [n_parked, n_key_heads, d_key]: normalised
    parked_deltas: Tensor  # [n_parked, n_value_heads, d_value]
    parked_decays: Tensor  # [n_parked, n_value_heads], or [n_parked, n_value_heads, d_key] (KDA)
