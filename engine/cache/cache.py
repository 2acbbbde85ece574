"""The cache as the engine calls it: for every slot one page table, and one length per store.

Tokens are the truth; everything here can be dropped and rebuilt from them. A store's rows past its own length are
scratch: drafting and verifying may write them, and they are never read later. Only `commit` makes a running sequence
longer.

Paged rows can be rolled back exactly. A recurrent state cannot: where its parked rows do not reach, it is set to the
nearest snapshot before, or to nothing, and ordinary prefill fills the gap. Likewise for layers that look back over a
window, once the window has moved on: the sequence goes back to a page border whose window still lives, or to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.engine.batch import Batch, Span
from slipstream.engine.cache.pages import PagePool, prefix_keys
from slipstream.engine.cache.snapshots import Snapshots
from slipstream.engine.cache.store import Store

# Most bytes of snapshots per byte of keys and values. With 8 and Qwen3.5-27B in bfloat16 they lie 320 tokens apart.
# More fill the host's memory with states that are seldom resumed; with fewer, less of a shared prefix is saved.
_SNAPSHOT_SHARE = 8
_HOST = torch.device("cpu")


@dataclass(slots=True)
class _Entry:
    """A slot's pages, the valid length of each store, and the keys of its full pages so far."""

    salt: str = ""
    table: list[int] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    offered: tuple[int, ...] = ()  # full pages per store at the last publish


class Cache:
    """Page tables of all slots over the stores of the target and the draft networks."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        n_slots: int,
        n_pages: int,
        page_size: int,
        followers: Collection[str] = (),
        snapshots: Snapshots | None = None,
    ) -> None:
        """`stores` names one store per network; the first is the target's.

        followers: stores whose rows can only be made while the target computes the same tokens. A prefix is adopted
        as far as it is complete for them too, or they would have a gap for ever.
        """
        self.stores = dict(stores)
        self.page_size = page_size
        self.pool = PagePool(n_pages)
        self.snapshots = snapshots if snapshots is not None else Snapshots(0)
        self.primary = next(iter(self.stores))
        self.followers = tuple(followers)
        self._strides = {name: self._stride(store) for name, store in self.stores.items()}
        self._entries = [_Entry(lengths=dict.fromkeys(self.stores, 0)) for _ in range(n_slots)]

    def _stride(self, store: Store) -> int | None:
        """Tokens from one snapshot to the next, a multiple of the page size; None if no snapshots are kept."""
        if store.parking is None or not self.snapshots.has_room:
            return None
        n_tokens = store.slot_bytes // max(1, _SNAPSHOT_SHARE * store.token_bytes)
        return max(1, round(n_tokens / self.page_size)) * self.page_size

    def begin(self, slot: int, tokens: Sequence[int], salt: str) -> int:
        """Adopt the longest published prefix of `tokens`, at most all but the last; return the target's length."""
        self.drop(slot)
        entry = self._entries[slot]
        entry.salt = salt
        size = self.page_size
        for key in prefix_keys(tokens[: len(tokens) - 1], size, salt):
            page_id = self.pool.find(key)
            if page_id is None:
                break
            self.pool.hold(page_id)
            entry.table.append(page_id)
            entry.keys.append(key)
        for name, n_pages in self.resumable(entry.keys, entry.table).items():
            store, entry.lengths[name] = self.stores[name], n_pages * size
            if store.windows is not None:
                store.windows.adopt(slot, entry.keys[:n_pages])
            if store.parking is not None:
                self._resume(slot, name)
        self._trim(entry, entry.lengths[self.primary])
        return entry.lengths[self.primary]

    def resumable(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> dict[str, int]:
        """Per store, how many of these published pages a sequence can go on from. keys: the pages' own."""
        known = [self.pool.pages[page_id].complete for page_id in page_ids]
        complete = {}
        for name in self.stores:
            gaps = (n for n, stores in enumerate(known) if name not in stores)
            complete[name] = next(gaps, len(known))
        n_pages = min(complete[name] for name in (self.primary, *self.followers))
        for name, store in self.stores.items():
            n = min(complete[name], n_pages)
            if store.windows is not None:
                n = store.windows.n_adoptable(keys[:n])
            if store.parking is not None:
                n = next((i for i in range(n, 0, -1) if (name, keys[i - 1]) in self.snapshots), 0)
            complete[name] = n
            n_pages = complete[self.primary]  # the target comes first, and limits the others
        return complete

    def length(self, slot: int, store: str) -> int:
        """Tokens of the slot whose rows in the store are valid."""
        return self._entries[slot].lengths[store]

    def table(self, slot: int) -> Sequence[int]:
        """The slot's page ids in order of position."""
        return self._entries[slot].table

    def batch(self, store: str, spans: Sequence[Span], token_ids: Tensor | None = None) -> Batch:
        """The pass over these spans, which is about to run on the store; its rows have been reserved.

        token_ids: [n_tokens] int64, if they are only on the device.
        """
        where = self.stores[store]
        recurrent = None
        if where.parking is not None:
            lengths = [self._entries[span.slot].lengths[store] for span in spans]
            recurrent = where.parking.rows(spans, lengths, _HOST)
        tables = [self._entries[span.slot].table for span in spans]
        batch = Batch.build(spans, tables, self.page_size, _HOST, recurrent)
        if where.windows is not None:
            tables = [where.windows.table(span.slot) for span in spans]
            batch = replace(batch, window=batch.on_pages(tables, self.page_size))
        batch = where.frames.place(batch, where.device)
        if token_ids is not None:
            batch.token_ids[: len(token_ids)].copy_(token_ids)
        return batch

    def reserve(self, slot: int, store: str, start: int, end: int, n_drafts: int = 0) -> bool:
        """Make positions [start, end) writable for a store: enough pages, each held by this slot alone.

        n_drafts: the last of them that are provisional, which a recurrent store needs to park. A shared page is
        copied first. Changes nothing that matters and returns False when there is no room.
        """
        entry = self._entries[slot]
        size = self.page_size
        known = range(start // size, min(len(entry.table), -(-end // size)))
        shared = [i for i in known if self.pool.pages[entry.table[i]].n_holders > 1]
        n_new = max(0, -(-end // size) - len(entry.table))
        if n_new + len(shared) > self.pool.n_available:
            return False
        where = self.stores[store]
        if where.parking is not None and not where.parking.reserve(slot, n_drafts):
            return False
        if where.windows is not None and not where.windows.reserve(slot, start, end, where.copy_window_page):
            return False
        for i in shared:
            self._copy(entry, i)
        for i in known:
            if store in self.pool.pages[entry.table[i]].complete:
                self.pool.withdraw(entry.table[i])  # its published rows are about to change
        entry.table.extend(self.pool.take() for _ in range(n_new))
        return True

    def _copy(self, entry: _Entry, index: int) -> None:
        source, target = entry.table[index], self.pool.take()
        for store in self.stores.values():
            store.copy_page(source, target)
        self.pool.release(source)
        entry.table[index] = target

    def commit(self, slot: int, store: str, length: int) -> None:
        """Make the rows before `length` of a store part of the sequence, and none behind."""
        parking = self.stores[store].parking
        if parking is not None:
            parking.commit(slot, length)
        self._entries[slot].lengths[store] = length

    def rollback(self, slot: int, n_tokens: int) -> int:
        """Shorten every store to at most `n_tokens`; return the target's length, which may be less."""
        entry = self._entries[slot]
        for name in self.stores:
            self._cut(slot, name, n_tokens)
        self._follow(slot)
        self._trim(entry, n_tokens)
        return entry.lengths[self.primary]

    def _cut(self, slot: int, name: str, n_tokens: int) -> None:
        """Shorten one store to at most `n_tokens`."""
        entry, store = self._entries[slot], self.stores[name]
        if n_tokens >= entry.lengths[name]:
            return
        entry.lengths[name] = n_tokens
        if store.windows is not None:
            keys = entry.keys[: n_tokens // self.page_size]
            entry.lengths[name] = store.windows.rollback(slot, keys, n_tokens)
        if store.parking is not None and store.parking.length(slot) <= n_tokens:
            store.parking.commit(slot, n_tokens)
        elif store.parking is not None:
            self._resume(slot, name)

    def recover(self, slot: int) -> int:
        """A pass of the target broke off: recurrent states may have moved in some layers and not in others.

        Returns the target's length, which is what it was unless there is such state. Other stores stay as they are:
        what they hold is of the same tokens, and the target will be fed these again before it goes on.
        """
        entry = self._entries[slot]
        if self.stores[self.primary].parking is not None:
            self._resume(slot, self.primary)
        return entry.lengths[self.primary]

    def _resume(self, slot: int, name: str) -> None:
        """Set a recurrent store to the last snapshot of the slot's tokens within its length, or to nothing."""
        entry, store = self._entries[slot], self.stores[name]
        for n_pages in range(min(len(entry.keys), entry.lengths[name] // self.page_size), 0, -1):
            states = self.snapshots.find((name, entry.keys[n_pages - 1]))
            if states is not None:
                entry.lengths[name] = n_pages * self.page_size
                store.restore(slot, states, entry.lengths[name])
                return
        entry.lengths[name] = 0
        store.reset(slot)

    def _follow(self, slot: int) -> None:
        """Stores that are fed with the target's passes go back as far as the target did."""
        for name in self.followers:
            self._cut(slot, name, self._entries[slot].lengths[self.primary])

    def _trim(self, entry: _Entry, n_tokens: int) -> None:
        """Give back the pages behind `n_tokens`."""
        n_pages = -(-n_tokens // self.page_size)
        for page_id in entry.table[n_pages:]:
            self.pool.release(page_id)
        del entry.table[n_pages:]
        del entry.keys[n_tokens // self.page_size :]
        entry.offered = ()

    def next_border(self, store: str, start: int, n_prompt: int) -> int | None:
        """Where a chunk of known tokens from `start` must end at the latest, so that a snapshot can be taken there.

        None: anywhere. Snapshots are taken so far apart that they cost at most a few times what the keys and values
        between them do, and once more at the last border of the prompt, from where its next turn goes on.
        """
        stride = self._strides[store]
        if stride is None:
            return None
        last = self._last_border(n_prompt)
        border = (start // stride + 1) * stride
        return last if start < last < border else border

    def _last_border(self, n_prompt: int) -> int:
        return (n_prompt - 1) // self.page_size * self.page_size

    def publish(self, slot: int, tokens: Sequence[int], n_prompt: int) -> None:
        """Offer the slot's full pages to other slots, each for the stores whose rows in it are complete."""
        entry = self._entries[slot]
        size = self.page_size
        offered = tuple(length // size for length in entry.lengths.values())
        if offered == entry.offered:
            return
        entry.offered = offered
        n_full = max(offered)
        if n_full > len(entry.keys):
            parent = entry.keys[-1] if entry.keys else None
            fresh = tokens[len(entry.keys) * size : n_full * size]
            entry.keys.extend(prefix_keys(fresh, size, entry.salt, parent))
        for i in range(entry.lengths[self.primary] // size):
            page = self.pool.pages[entry.table[i]]
            complete = {name for name, length in entry.lengths.items() if length >= (i + 1) * size}
            if page.key is None or not complete <= page.complete:
                self.pool.publish(entry.table[i], entry.keys[i], complete)
        for name, store in self.stores.items():
            if store.windows is not None:
                store.windows.publish(slot, entry.keys, entry.lengths[name])
            self._snapshot(slot, name, n_prompt)

    def _snapshot(self, slot: int, name: str, n_prompt: int) -> None:
        """Take the snapshots that the store has come to since the last publish.

        Parked rows are folded one border at a time, so that a draft may run over a border.
        """
        store, entry = self.stores[name], self._entries[slot]
        if store.parking is None or self._strides[name] is None:
            return
        # The state may stand on a border.
        start, end = max(0, store.parking.length(slot) - 1), entry.lengths[name]
        while (border := self.next_border(name, start, n_prompt)) is not None and border <= end:
            key = (name, entry.keys[border // self.page_size - 1])
            if key not in self.snapshots:
                store.settle(slot, border)
                self.snapshots.put(key, store.snapshot(slot))
            start = border

    def drop(self, slot: int) -> None:
        """Forget the slot's state; the tokens remain with their owner, published pages with the pool."""
        entry = self._entries[slot]
        for store in self.stores.values():
            store.reset(slot)
        for page_id in reversed(entry.table):  # the last page goes first when cached pages are taken back
            self.pool.release(page_id)
        entry.table.clear()
        entry.keys.clear()
        entry.offered = ()
        entry.lengths = dict.fromkeys(self.stores, 0)
