"""What a draft network has not been fed of the target's hidden states: copied as they come, fed when it is asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from slipstream.engine.batch import Batch, Span, upload
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.store import Store
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import Kept


class Backlog:
    """The store of one draft network, named after it, and the target's states at tokens that it lacks.

    States exist only while the target computes a token, so the last ones of each slot are copied from every pass; no
    network runs for it. Where older ones are gone, or never came, a sequence's rows would have a gap: then they start
    over, as if the text began at the first page border from where there are states.
    """

    def __init__(
        self, name: str, taps: tuple[int, ...], cache: Cache, n_context: int, n_behind: int = 0
    ) -> None:
        """n_context: tokens before a guess that are fed at least, if there are so many, and pages of windows for them.

        n_behind: rows at a sequence's end that not all layers have yet. They count as scratch, and the store's length
        is that of the shortest layer: a prefix is shared as far as all layers have it.
        """
        self.name = name
        self.taps = taps
        self._cache = cache
        self._n_behind = n_behind
        # States kept of a slot: from wherever it begins, a context has a page border before it.
        self._room = n_context + cache.page_size - 1
        if self.store.windows is not None:  # what cannot be fed at once would never be fed
            self._room = min(self._room, self.store.windows.n_feedable)
        self._noted: dict[int, range] = {}  # by slot id, the positions whose states are kept
        # Per tap [n_slots * room, d_target]: the state at position p of slot i is row i * room + p % room.
        self._states: list[Tensor] = []

    @property
    def page_size(self) -> int:
        return self._cache.page_size

    @property
    def store(self) -> Store:
        return self._cache.stores[self.name]

    def forget(self, slot: Slot) -> None:
        """The slot has another sequence."""
        self._noted.pop(slot.id, None)

    def note(self, kept: Sequence[Kept]) -> None:
        """Keep the states of the tokens that a pass added."""
        sources, places = [], []  # rows of the pass, and where they go
        taps = None
        for one in kept:
            slot, end = one.slot, one.slot.n_past
            if one.streams is None or end <= one.start:
                continue
            taps = one.streams.taps
            noted = self._noted.get(slot.id)
            start = one.start if noted is None or noted.stop != one.start else noted.start
            self._noted[slot.id] = range(max(start, end - self._room), end)
            fresh = range(max(one.start, end - self._room), end)
            sources.append(np.asarray(fresh) - one.start + one.streams.first)
            places.append(self._places(slot, fresh))
        if taps is None:
            return
        streams = taps.of(self.taps)  # [n_rows of the pass, d_target] each
        if not self._states:
            n_rows = self.store.sizes.n_slots * self._room
            self._states = [one.new_empty((n_rows, *one.shape[1:])) for one in streams]
        source, place = upload((np.concatenate(sources), np.concatenate(places)), streams[0].device)
        for states, stream in zip(self._states, streams, strict=True):
            states.index_copy_(0, place, stream.index_select(0, source))

    def unfed(self, slot: Slot) -> range | None:
        """Positions to be fed before a guess, maybe none; None if there is no going on from the states kept."""
        n_past, length, noted = slot.n_past, self.length(slot), self._noted.get(slot.id)
        if length >= n_past:
            return range(n_past, n_past)
        if noted is None or noted.stop != n_past:
            return None
        size = self.page_size
        start = length if noted.start <= length else -(-noted.start // size) * size
        return range(start, n_past) if start < n_past else None

    def last(self, slot: Slot) -> range | None:
        """The last position, to be fed again; None if its state is not kept."""
        n_past = slot.n_past
        return range(n_past - 1, n_past) if n_past - 1 in self._noted.get(slot.id, ()) else None

    def n_unfed(self, slot: Slot) -> int:
        """As `DeviceDrafter.n_unfed`."""
        return len(self.unfed(slot) or ())

    def reserve(self, slot: Slot, rows: range, n_drafts: int) -> bool:
        """Make these rows up to the slot's last writable, and scratch rows for drafts behind them."""
        if rows.start > self.length(slot):
            self._cache.restart(slot.id, self.name, rows.start)
        return self._cache.reserve(slot.id, self.name, rows.start, slot.n_past + n_drafts)

    def states(self, fed: Sequence[tuple[Slot, range]]) -> list[Tensor]:
        """The states at these positions, slot after slot: per tap [n_rows, d_target]."""
        (index,) = upload(
            (np.concatenate([self._places(slot, rows) for slot, rows in fed]),), self._states[0].device
        )
        return [one.index_select(0, index) for one in self._states]

    def _places(self, slot: Slot, positions: range) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return slot.id * self._room + np.asarray(positions, dtype=np.int64) % self._room

    def commit(self, slot: Slot) -> None:
        """The slot's rows up to where the target is have been written."""
        # An adopted prefix has all its rows, so the first rows after it leave the length where it is.
        self._cache.commit(slot.id, self.name, max(self.length(slot), slot.n_past - self._n_behind))

    def length(self, slot: Slot) -> int:
        """Tokens of the slot up to the last whose row all layers have."""
        return self._cache.length(slot.id, self.name)

    def batch(self, spans: Sequence[Span], token_ids: Tensor | None = None) -> Batch:
        """The spans over their slots' pages. token_ids: [n_tokens] int64, if they are only on the device."""
        return self._cache.batch(self.name, spans, token_ids)
