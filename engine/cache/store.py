"""The device memory of one network, behind one set of methods, and whose it is.

A layer says what it needs as data; the store makes it (`held.py`). Rows of keys and values are addressed by page,
recurrent state by slot with a pool of parked rows beside it. Layers that look back over a window have pages of their
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.held import Held
from slipstream.engine.cache.need import Need, Sizes
from slipstream.engine.cache.parking import Parking
from slipstream.engine.cache.window import WindowPages
from slipstream.engine.frames import ExactFrames, Frame, Frames, FrameSize, Room


class Store:
    """All layers of one network. `layers[k]` is what layer k is handed in a pass."""

    def __init__(
        self,
        needs: Sequence[Need],
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        held: Held | None = None,
    ) -> None:
        """held: the memory, of these needs and sizes; None: it is made here."""
        self.sizes = sizes
        self.held = Held(needs, sizes, dtype, device) if held is None else held
        self.layers: Sequence[Any] = self.held.layers
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
        windows = [need.window for need in needs if need.window is not None and need.source is None]
        if windows:
            if self.parking is not None:
                raise ValueError("recurrent layers and windows in one network are not supported")
            self.windows = WindowPages(sizes.n_slots, sizes.n_window_pages, sizes.page_size, max(windows))

    @property
    def is_positional(self) -> bool:
        """Whether a position alone says where a row lies, so a batch can be moved back on the device.

        Not so where the host plans what is folded into a state, or which pages a window has left.
        """
        return self.parking is None and self.windows is None

    def make_frames(self, sizes: Sequence[FrameSize] | None, n_pages: int, n_drafts: int) -> Frames:
        """Frames of these sizes; None: exact ones. `frames` has none of them yet.

        n_pages: of a sequence at full length; n_drafts: of a slot at most.
        """
        room = Room(
            n_pages=n_pages,
            spare_page=self.sizes.n_pages,
            spare_window_page=None if self.windows is None else self.sizes.n_window_pages,
            n_history=None if self.parking is None else n_drafts,
        )
        if sizes is None:
            return ExactFrames(room, self.device)
        self.held.capture(sizes, n_pages, n_drafts)
        return Frames([Frame(size, room, self.device) for size in sizes])

    def place(self, batch: Batch) -> Batch:
        """A batch of the host, which is about to run, on the device."""
        placed = self.frames.place(batch, self.device)
        self.held.note(batch, placed.frame.size if isinstance(placed.frame, Frame) else None)
        return placed

    def reset(self, slot: int, length: int = 0) -> None:
        """The slot starts from nothing: recurrent states are zero, nothing is parked, no window is held.

        length: tokens before its first row, which it will never see; a multiple of the page size.
        """
        if self.windows is not None:
            self.windows.drop(slot, length // self.sizes.page_size)
        if self.parking is not None:
            self.parking.reset(slot, length)
            self.held.reset(slot)

    def settle(self, slot: int, length: int) -> None:
        """Bring the recurrent states to `length` tokens: not behind where they stand, nor past the parked rows."""
        if self.parking is not None and (rows := self.parking.settle(slot, length, self.device)) is not None:
            self.held.settle(rows)

    def snapshot(self, slot: int) -> list[Tensor]:
        """A copy in host memory of the slot's recurrent states as they stand."""
        return self.held.states(slot)

    def restore(self, slot: int, states: Sequence[Tensor], length: int) -> None:
        """The opposite of `snapshot`, taken at `length` tokens."""
        assert self.parking is not None
        self.parking.reset(slot, length)
        self.held.set_states(slot, states)
