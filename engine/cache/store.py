"""The device memory of one network: what each layer asked for, behind one set of methods.

A layer says what it needs as data; the store makes it. Rows of keys and values are addressed by page, recurrent
state by slot with a pool of parked rows beside it. Layers that look back over a window have pages of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.batch import RecurrentRows
from slipstream.engine.cache.parking import Parking
from slipstream.engine.cache.window import WindowPages
from slipstream.engine.frames import Frame, Frames, Room


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

    def copy_page(self, source: int, target: int) -> None:
        """Copy the rows of one page onto another; where the layer has a window, of `WindowPages`."""

    def reset(self, slot: int) -> None:
        """Back to the state before any token. Rows past a length are scratch, so of pages there is nothing to do."""

    def settle(self, rows: RecurrentRows) -> None:
        """Fold parked rows into the state, with no row of a pass behind them."""

    def of_slot(self, slot: int) -> list[Tensor]:
        """Views of all that is the slot's own and no page's."""
        return []

    def of_pages(self) -> list[Tensor]:
        """All that belongs to pages: tensors whose first dimension is the page id."""
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

    def kept_in(self, dtype: torch.dtype | None) -> Need:
        """The same with what belongs to positions in that dtype; None: the network's. States stay as they are."""
        return self

    @abstractmethod
    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> LayerState:
        """The memory, zeroed."""


class Store:
    """All layers of one network. `layers[k]` is what layer k is handed in a pass."""

    def __init__(self, needs: Sequence[Need], sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = sizes
        # One page more than `sizes` says: rows of no span are written there. `layers` is what each need allocated; only
        # the layer itself depends on the type.
        spare = replace(sizes, n_pages=sizes.n_pages + 1, n_window_pages=sizes.n_window_pages + 1)
        own = {i: need.allocate(spare, dtype, device) for i, need in enumerate(needs) if need.source is None}
        self.layers: list[Any] = [
            own[i if need.source is None else need.source] for i, need in enumerate(needs)
        ]
        self.frames = Frames([])  # where batches of captured sizes go
        self.device = device
        self.token_bytes = sum(need.token_bytes(dtype) for need in needs)
        self.slot_bytes = sum(need.slot_bytes(dtype) for need in needs)
        # Which slot each parked row belongs to; None for a network without recurrent layers.
        self.parking: Parking | None = None
        if any(need.is_recurrent for need in needs):
            self.parking = Parking(sizes.n_slots, sizes.n_parked)
        # The pages of layers with a window, and which slot holds them; None for a network without such layers.
        self.windows: WindowPages | None = None
        pairs = [(needs[i], layer) for i, layer in own.items()]
        self._full = [layer for need, layer in pairs if need.window is None]
        self._windowed = [layer for need, layer in pairs if need.window is not None]
        if self._windowed:
            if self.parking is not None:
                raise ValueError("recurrent layers and windows in one network are not supported")
            window = max(need.window for need in needs if need.window is not None)
            self.windows = WindowPages(sizes.n_slots, sizes.n_window_pages, sizes.page_size, window)

    @property
    def is_positional(self) -> bool:
        """Whether a position alone says where a row lies, so a batch can be moved back on the device.

        Not so where the host plans what is folded into a state, or which pages a window has left.
        """
        return self.parking is None and self.windows is None

    def make_frames(self, sizes: Sequence[tuple[int, int]], n_pages: int, n_drafts: int) -> list[Frame]:
        """Frames of these (spans, rows). n_pages: of a sequence at full length; n_drafts: of a slot at most."""
        room = Room(
            n_pages=n_pages,
            spare_page=self.sizes.n_pages,
            spare_window_page=None if self.windows is None else self.sizes.n_window_pages,
            n_history=None if self.parking is None else n_drafts,
        )
        return [Frame(n_spans, n_rows, room, self.device) for n_spans, n_rows in sizes]

    def copy_page(self, source: int, target: int) -> None:
        """Copy all layers' rows of one page onto another, for copy-on-write of a shared page."""
        for layer in self._full:
            layer.copy_page(source, target)

    def copy_window_page(self, source: int, target: int) -> None:
        """The same for the pages of layers with a window."""
        for layer in self._windowed:
            layer.copy_page(source, target)

    def reset(self, slot: int, length: int = 0) -> None:
        """The slot starts from nothing: recurrent states are zero, nothing is parked, no window is held.

        length: tokens before its first row, which it will never see; a multiple of the page size.
        """
        if self.windows is not None:
            self.windows.drop(slot, length // self.sizes.page_size)
        if self.parking is not None:
            self.parking.reset(slot, length)
            for layer in self.layers:
                layer.reset(slot)

    def settle(self, slot: int, length: int) -> None:
        """Bring the recurrent states to `length` tokens: not behind where they stand, nor past the parked rows."""
        if self.parking is not None and (rows := self.parking.settle(slot, length, self.device)) is not None:
            for layer in self.layers:
                layer.settle(rows)

    def snapshot(self, slot: int) -> list[Tensor]:
        """A copy in host memory of the slot's recurrent states as they stand."""
        return [view.to("cpu", copy=True) for layer in self.layers for view in layer.of_slot(slot)]

    def restore(self, slot: int, states: Sequence[Tensor], length: int) -> None:
        """The opposite of `snapshot`, taken at `length` tokens."""
        assert self.parking is not None
        self.parking.reset(slot, length)
        views = [view for layer in self.layers for view in layer.of_slot(slot)]
        for view, state in zip(views, states, strict=True):
            view.copy_(state)

    @property
    def page_tensors(self) -> list[Tensor]:
        """What the layers keep by page, [n_pages, ...] each."""
        return [tensor for layer in self._full for tensor in layer.of_pages()]

    @property
    def window_tensors(self) -> list[Tensor]:
        """What layers with a window keep by page of `windows`, [n_window_pages, ...] each."""
        return [tensor for layer in self._windowed for tensor in layer.of_pages()]

    @property
    def slot_tensors(self) -> list[Tensor]:
        """What the layers keep by slot, as seen for one slot: shapes and dtypes of a snapshot."""
        return [view for layer in self.layers for view in layer.of_slot(0)]
