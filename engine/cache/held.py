"""The memory of all layers of one network on one device: what is done to it, whoever decides that.

A store decides; where a network is divided over ranks, the same is done to the memory of each (`spread.py`). What is
read of it or written to it from outside is of the whole network, so a saved prefix and a snapshot are the same however
many ranks there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.need import LayerState, Need, Sizes
from slipstream.engine.frames import FrameSize
from slipstream.kernels.gated_delta.spans import RecurrentRows

Shape = tuple[tuple[int, ...], torch.dtype]
PageKind = Literal["full", "window"]  # pages of the layers without a window, or of those with one
_NOTHING: AbstractContextManager[None] = nullcontext()


class Held:
    """The layers' memory. `layers[k]` is what layer k is handed in a pass."""

    def __init__(self, needs: Sequence[Need], sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        # One page more than `sizes` says: rows of no span are written there. `layers` is what each need allocated; only
        # the layer itself depends on the type.
        spare = replace(sizes, n_pages=sizes.n_pages + 1, n_window_pages=sizes.n_window_pages + 1)
        own = {i: need.allocate(spare, dtype, device) for i, need in enumerate(needs) if need.source is None}
        self.layers: list[Any] = [
            own[i if need.source is None else need.source] for i, need in enumerate(needs)
        ]
        pairs = [(needs[i], layer) for i, layer in own.items()]
        self._paged: Mapping[PageKind, list[LayerState]] = {
            "full": [layer for need, layer in pairs if need.window is None],
            "window": [layer for need, layer in pairs if need.window is not None],
        }

    def together(self) -> AbstractContextManager[None]:
        """Around every pass over the memory: all ranks run it."""
        return _NOTHING

    def note(self, batch: Batch, frame: FrameSize | None) -> None:
        """The batch, on the host, of the pass that runs next; the size of the frame it runs in, if it does."""

    def capture(self, sizes: Sequence[FrameSize], n_pages: int, n_drafts: int) -> None:
        """Passes over the memory are captured next, in frames as `Store.make_frames` makes them."""

    def copy_page(self, kind: PageKind, source: int, target: int) -> None:
        """Copy all layers' rows of one page onto another."""
        for tensor in self.page_tensors(kind):
            tensor[target].copy_(tensor[source])

    def reset(self, slot: int) -> None:
        """The slot's recurrent states are zero."""
        for view in self.slot_views(slot):
            view.zero_()

    def settle(self, rows: RecurrentRows) -> None:
        """Fold parked rows into the states, with no row of a pass behind them."""
        for layer in self.layers:
            layer.settle(rows)

    def states(self, slot: int) -> list[Tensor]:
        """A copy in host memory of the slot's recurrent states."""
        return [view.to("cpu", copy=True) for view in self.slot_views(slot)]

    def set_states(self, slot: int, states: Sequence[Tensor]) -> None:
        """The opposite of `states`."""
        for view, state in zip(self.slot_views(slot), states, strict=True):
            view.copy_(state)

    def pages(self, kind: PageKind, page_ids: Sequence[int]) -> list[Tensor]:
        """Copies of some pages in host memory, [len(page_ids), ...] each."""
        return [one.to("cpu") for one in self.rows_of(kind, page_ids)]

    def set_pages(self, kind: PageKind, page_ids: Sequence[int], rows: Sequence[Tensor]) -> None:
        """The opposite of `pages`."""
        for tensor, stored in zip(self.page_tensors(kind), rows, strict=True):
            index = torch.tensor(page_ids, device=tensor.device).long()
            tensor[index] = stored.to(tensor.device)  # index_copy_ takes no float8

    def page_shapes(self, kind: PageKind) -> list[Shape]:
        """Of what `pages` returns, for one page."""
        return [(tuple(one.shape[1:]), one.dtype) for one in self.page_tensors(kind)]

    @property
    def slot_shapes(self) -> list[Shape]:
        """Of what `states` returns."""
        return [(tuple(one.shape), one.dtype) for one in self.slot_views(0)]

    def page_tensors(self, kind: PageKind) -> list[Tensor]:
        """What the layers keep by page on this device, [n_pages of the kind, ...] each."""
        return [tensor for layer in self._paged[kind] for tensor in layer.of_pages()]

    def slot_views(self, slot: int) -> list[Tensor]:
        """What the layers keep of a slot on this device."""
        return [view for layer in self.layers for view in layer.of_slot(slot)]

    def rows_of(self, kind: PageKind, page_ids: Sequence[int]) -> list[Tensor]:
        """Copies of some pages on this device, [len(page_ids), ...] each."""
        index = torch.tensor(page_ids, dtype=torch.int64)
        return [one.index_select(0, index.to(one.device)) for one in self.page_tensors(kind)]
