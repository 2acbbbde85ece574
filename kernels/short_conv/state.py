"""What a short convolution keeps between passes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ConvState:
    """One layer's last inputs by slot, oldest first, and a pool of parked inputs. Of the rows' dtype.

    The window of a slot is zeroed by its owner when a sequence begins: inputs before a sequence are zeros.
    """

    window: Tensor  # [n_slots, width - 1, n_channels]
    parked: Tensor  # [n_parked, n_channels]
