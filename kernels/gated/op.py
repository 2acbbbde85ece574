"""Gates: the activation between the two linear layers of a feed-forward block, the sigmoid gate of an output, a cap."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.dispatch import op
from slipstream.kernels.gated.activation import Activation


@op("triton", "cpu", "reference")
def gated_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """The gate's activation times up, in float32, rounded once.

    silu: silu(gate) * up. gelu: gelu(gate) * up, in its tanh form (`gelu_pytorch_tanh`, Gemma).
    clamped: (up + 1) * gate * sigmoid(steepness * gate); before that gate is cut at limit from above, up at -limit and
    at limit (gpt-oss). limited: min(silu(gate), limit) * up; before that up is cut at -limit and at limit (Step).
    gate_up: [n_rows, 2 * d_inner], gate first. Returns [n_rows, d_inner], the same dtype.
    """
    raise NotImplementedError


@op("triton", "cpu", "reference")
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) in float32, rounded once: the output gate of attention, the gate of a shared expert.

    x: [n_rows, d]. gate: [n_rows, d], or [n_rows, 1] for one gate a row; x's dtype. Returns [n_rows, d].
    """
    raise NotImplementedError


@op("triton", "cpu", "reference")
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) in float32, rounded once (Gemma's logits). cap: above 0. x: [n_rows, d]. Returns the same."""
    raise NotImplementedError
