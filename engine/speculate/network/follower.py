"""The store of a draft network that reads the target's hidden states: after each pass it takes in the kept rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from slipstream.engine.batch import Batch, Span, upload
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.store import Store
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import Kept


@dataclass(frozen=True, slots=True)
class Fed:
    """The kept rows of a pass that a store can take in, span after span."""

    kept: list[Kept]
    streams: list[Tensor]  # per tap [n_rows, d_target]


class Follower:
    """The store of one draft network, named after it.

    Rows can only be made while the target computes the same tokens. After a gap a sequence's rows are lost, and
    nothing can be drafted for it any more.
    """

    def __init__(self, name: str, taps: tuple[int, ...], cache: Cache, n_behind: int = 0) -> None:
        """n_behind: rows at a sequence's end that not all layers have yet. They count as scratch.

        The store's length is then that of the shortest layer, so a prefix is shared as far as all layers have it.
        """
        self.name = name
        self.taps = taps
        self._cache = cache
        self._n_behind = n_behind

    @property
    def page_size(self) -> int:
        return self._cache.page_size

    @property
    def store(self) -> Store:
        return self._cache.stores[self.name]

    def take(self, kept: Sequence[Kept]) -> Fed | None:
        """What of a pass can be taken in: sequences without a gap before it, and with pages to write to."""
        fed = [one for one in kept if self._fits(one)]
        if not fed or fed[0].streams is None:
            return None
        rows: list[int] = []
        for one in fed:
            assert one.streams is not None
            rows.extend(range(one.streams.first, one.streams.first + one.slot.n_past - one.start))
        streams = fed[0].streams.taps.of(self.taps)  # [n_rows of the pass, d_target] each
        (index,) = upload((np.asarray(rows, np.int64),), streams[0].device)
        return Fed(fed, [one.index_select(0, index) for one in streams])

    def _fits(self, one: Kept) -> bool:
        return one.slot.n_past > one.start and self._reserve(one.slot, one.start, one.slot.n_past)

    def commit(self, slot: Slot) -> None:
        """The slot's rows up to where the target is have been written."""
        # An adopted prefix has all its rows, so the first rows after it leave the length where it is.
        self._cache.commit(slot.id, self.name, max(self.length(slot), slot.n_past - self._n_behind))

    def length(self, slot: Slot) -> int:
        """Rows of the slot that all layers have."""
        return self._cache.length(slot.id, self.name)

    def has_room(self, slot: Slot, n_drafts: int) -> bool:
        """Whether the slot's rows are complete and scratch rows for drafts can be had."""
        return self._reserve(slot, slot.n_past, slot.n_past + n_drafts)

    def _reserve(self, slot: Slot, n_past: int, end: int) -> bool:
        """Make writable what is not complete before `end`, if the rows before n_past have no gap."""
        length = self.length(slot)
        return n_past - self._n_behind <= length <= n_past and self._cache.reserve(
            slot.id, self.name, length, end
        )

    def batch(self, spans: Sequence[Span], token_ids: Tensor | None = None) -> Batch:
        """The spans over their slots' pages. token_ids: [n_tokens] int64, if they are only on the device."""
        return self._cache.batch(self.name, spans, token_ids)
