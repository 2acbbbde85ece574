"""A draft network's store that is fed with what the target computes, pass by pass, kept rows only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch, Span
from engine.cache.cache import Cache
from engine.cache.store import Store
from engine.slot import Slot
from engine.speculate.drafter import Kept


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

    def __init__(self, name: str, taps: tuple[int, ...], cache: Cache) -> None:
        self.name = name
        self.taps = taps
        self._cache = cache

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
        index = torch.tensor(rows, dtype=torch.int64, device=streams[0].device)
        return Fed(fed, [one.index_select(0, index) for one in streams])

    def _fits(self, one: Kept) -> bool:
        slot = one.slot
        return (
            slot.n_past > one.start
            and self._cache.length(slot.id, self.name) == one.start
            and self._cache.reserve(slot.id, self.name, one.start, slot.n_past)
        )

    def commit(self, fed: Fed) -> None:
        """The rows have been written."""
        for one in fed.kept:
            self._cache.commit(one.slot.id, self.name, one.slot.n_past)

    def has_room(self, slot: Slot, n_drafts: int) -> bool:
        """Whether the slot's rows are complete and scratch rows for drafts can be had."""
        n_past = slot.n_past
        return self._cache.length(slot.id, self.name) == n_past and self._cache.reserve(
            slot.id, self.name, n_past, n_past + n_drafts
        )

    def batch(self, spans: Sequence[Span]) -> Batch:
        """The spans over their slots' pages."""
        return self._cache.batch(self.name, spans)
