"""What a short convolution keeps between passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ConvState:
    """One layer's last inputs by slot, oldest first, and a pool of parked inputs. Of the rows' dtype.

    The window of a slot is zeroed by its owner when a sequence begins: inputs before a sequence are zeros.
    """

    window: Tensor  # [n_slots, width - 1, n_channels]
    parked: Tensor  # [n_parked, n_channels]

    def check(self, dtype: torch.dtype) -> None:
        """Raises ValueError where compiled code would read it as something else. dtype: of the rows."""
        if not all(x.dtype == dtype and x.is_contiguous() for x in (self.window, self.parked)):
            raise ValueError("window and parked are contiguous and of x's dtype")
