"""What a layer needs from the cache, as data, and what it is given for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.ranks import Joint
from slipstream.kernels.gated_delta.spans import RecurrentRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything a store holds."""

    n_slots: int
    n_pages: int
    page_size: int
    n_parked: int = 0  # rows of drafts that recurrent layers can keep in all; no layer needs them if 0
    n_window_pages: int = 0  # of layers that look back over a window; no layer needs them if 0


class LayerState:
    """One layer's share of a store. A method for state that a kind of layer does not have does nothing."""

    __slots__ = ()

    def settle(self, rows: RecurrentRows) -> None:
        """Fold parked rows into the state, with no row of a pass behind them."""

    def of_slot(self, slot: int) -> list[Tensor]:
        """Views of all that is the slot's own and no page's; zero before any token."""
        return []

    def of_pages(self) -> list[Tensor]:
        """All that belongs to pages: tensors whose first dimension is the page id, of `WindowPages` with a window."""
        return []


class Need(ABC):
    """What a layer needs from the cache, as data."""

    __slots__ = ()

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer keeps a state that cannot be cut back."""
        return False

    @property
    def window(self) -> int | None:
        """Positions that a row sees, its own included; None if it sees them all."""
        return None

    @property
    def source(self) -> int | None:
        """The layer whose memory it reads in place of its own; None if it has its own."""
        return None

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that one more token of a sequence takes."""
        return 0

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a slot takes however long its sequence is."""
        return 0

    def parked_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one parked row."""
        return 0

    def window_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a position takes while it lies within the window."""
        return 0

    @property
    def page_joints(self) -> Sequence[Joint | None]:
        """Of each tensor of `LayerState.of_pages` the dimension that ranks divide; None: each has all of it."""
        return ()

    @property
    def slot_joints(self) -> Sequence[Joint | None]:
        """The same of `LayerState.of_slot`."""
        return ()

    def kept_in(self, dtype: torch.dtype | None) -> Need:
        """The same with what belongs to positions in that dtype; None: the network's. States stay as they are."""
        return self

    @abstractmethod
    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> LayerState:
        """The memory, zeroed."""
