"""The short causal convolution before a recurrent layer, over the ragged rows of a pass."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.dispatch import op
from slipstream.kernels.gated_delta.spans import RecurrentRows as RecurrentRows
from slipstream.kernels.short_conv.state import ConvState as ConvState


@op("triton", "cpu", "reference")
def short_conv(x: Tensor, weight: Tensor, state: ConvState, spans: RecurrentRows) -> Tensor:
    """silu(Σ_j weight[:, j] * input[t - width + 1 + j]) for each of a span's rows, per channel.

    The inputs of a span are its slot's window, the parked rows of its history, its own rows. Column width - 1 of the
    weight multiplies the row itself.

    x: [n_rows, n_channels]; rows may be a slice of wider ones. weight: [n_channels, width], x's dtype.
    A weight whose transpose is contiguous is fastest; any other is transposed in each call. Returns
    [n_rows, n_channels], x's dtype: products summed from the oldest input to the newest and SiLU in float32, then
    rounded once. (Hugging Face transformers rounds before SiLU as well; in float32 the two are the same.)

    Changes `state` in place: windows become the last width - 1 of what came before update n_settled (they stay if
    that is 0), rows with a place in park_rows leave their input there.
    """
    raise NotImplementedError


@op("triton", "cpu", "reference")
def settle_windows(window: Tensor, state: ConvState, spans: RecurrentRows) -> None:
    """`settle_window`, with state.window first for the choice of implementation."""
    raise NotImplementedError


def settle_window(state: ConvState, spans: RecurrentRows) -> None:
    """Move the windows over the first n_settled parked rows of every span's history, in place.

    `spans` has no rows of its own: span_starts is all 0, and no n_settled exceeds its span's history.
    """
    settle_windows(state.window, state, spans)
