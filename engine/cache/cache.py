"""The cache as the engine calls it: for every slot one page table, and per store the range of rows that are valid.

Tokens are the truth; everything here can be dropped and rebuilt from them. A store's rows past its own length are
scratch: drafting and verifying may write them, and they are never read later. Only `commit` makes a running sequence
longer.

Paged rows can be rolled back exactly. A recurrent state cannot: where its parked rows do not reach, it is set to the
nearest snapshot before, or to nothing, and ordinary prefill fills the gap. Likewise for layers that look back over a
window, once the window has moved on: the sequence goes back to a page border whose window still lives, or to nothing.

The target's rows begin at 0. Those of a draft network may begin later, on a page border: what it never saw costs
guesses and no more. Its page table then begins there too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile

import torch
from torch import Tensor

from slipstream.engine.batch import Batch, Span
from slipstream.engine.cache.pages import PagePool, prefix_keys
from slipstream.engine.cache.snapshots import Snapshots
from slipstream.engine.cache.store import Store
from slipstream.engine.images import Marked

# Most bytes of snapshots per byte of keys and values. With 8 and Qwen3.5-27B in bfloat16 they lie 320 tokens apart.
# More fill the host's memory with states that are seldom resumed; with fewer, less of a shared prefix is saved.
_SNAPSHOT_SHARE = 8
_HOST = torch.device("cpu")


@dataclass(slots=True)
class _Entry:
    """A slot's pages, the valid rows of each store, and the keys of its full pages so far."""

    salt: str = ""
    images: Sequence[Marked] = ()
    table: list[int] = field(default_factory=list)
    rows: dict[str, range] = field(default_factory=dict)  # by store; a range begins on a page border
    keys: list[bytes] = field(default_factory=list)
    offered: tuple[range, ...] = ()  # full pages per store at the last publish


class Cache:
    """Page tables of all slots over the stores of the target and the draft networks."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        n_slots: int,
        n_pages: int,
        page_size: int,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`stores` names one store per network; the first is the target's."""
        self.stores = dict(stores)
        self.page_size = page_size
        self.pool = PagePool(n_pages)
        self.snapshots = snapshots if snapshots is not None else Snapshots(0)
        self.primary = next(iter(self.stores))
        self._strides = {name: self._stride(store) for name, store in self.stores.items()}
        self._entries = [_Entry(rows=dict.fromkeys(self.stores, range(0))) for _ in range(n_slots)]

    def _stride(self, store: Store) -> int | None:
        """Tokens from one snapshot to the next, a multiple of the page size; None if no snapshots are kept."""
        if store.parking is None or not self.snapshots.has_room:
            return None
        n_tokens = store.slot_bytes // max(1, _SNAPSHOT_SHARE * store.token_bytes)
        return max(1, round(n_tokens / self.page_size)) * self.page_size

    def begin(self, slot: int, tokens: Sequence[int], salt: str, images: Sequence[Marked] = ()) -> int:
        """Adopt the longest published prefix of `tokens`, at most all but the last; return the target's length.

        images: those among the tokens.
        """
        self.drop(slot)
        entry = self._entries[slot]
        entry.salt, entry.images = salt, images
        size = self.page_size
        known = prefix_keys(tokens[: len(tokens) - 1], size, salt, images)
        entry.keys, entry.table = self.pool.prefix(known)
        for page_id in entry.table:
            self.pool.hold(page_id)
        for name, pages in self.resumable(entry.keys, entry.table).items():
            store, entry.rows[name] = self.stores[name], range(pages.start * size, pages.stop * size)
            if store.windows is not None:
                store.windows.adopt(slot, entry.keys[: pages.stop])
            if store.parking is not None:
                self._resume(slot, name)
        self._trim(entry, self.length(slot, self.primary))
        return self.length(slot, self.primary)

    def resumable(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> dict[str, range]:
        """Per store, which of these published pages a sequence can go on from. keys: the pages' own.

        The target limits all. Any other store gives its last run of complete pages, wherever that begins and ends.
        """
        of_pages = (self.pool.pages[page_id].complete for page_id in page_ids)
        known = list(takewhile(lambda complete: self.primary in complete, of_pages))
        found = {}
        for name, store in self.stores.items():
            run = _last_run([name in complete for complete in known])
            end = run.stop
            if store.windows is not None:
                end = store.windows.n_adoptable(keys[:end])
            if store.parking is not None:
                ends = range(end, run.start, -1)
                end = next((i for i in ends if (name, keys[i - 1]) in self.snapshots), 0)
            found[name] = range(run.start, end) if end > run.start else range(0)
            known = known[: found[self.primary].stop]  # the target comes first
        return found

    def start(self, slot: int, store: str) -> int:
        """The first position whose row in the store is valid, if any is."""
        return self._entries[slot].rows[store].start

    def length(self, slot: int, store: str) -> int:
        """Tokens of the slot up to the last whose row in the store is valid."""
        return self._entries[slot].rows[store].stop

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
            lengths = [self.length(span.slot, store) for span in spans]
            recurrent = where.parking.rows(spans, lengths, _HOST)
        begins = [self.start(span.slot, store) for span in spans]
        firsts = [begin // self.page_size for begin in begins]
        tables = [self.table(span.slot)[first:] for span, first in zip(spans, firsts, strict=True)]
        batch = Batch.build(spans, tables, self.page_size, _HOST, recurrent, begins)
        if where.windows is not None:
            tables = [
                where.windows.table(span.slot)[first:] for span, first in zip(spans, firsts, strict=True)
            ]
            batch = replace(batch, window=batch.on_pages(tables, self.page_size, begins))
        batch = where.place(batch)
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
        if where.windows is not None and not where.windows.reserve(
            slot, start, end, partial(where.held.copy_page, "window")
        ):
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
            store.held.copy_page("full", source, target)
        self.pool.release(source)
        entry.table[index] = target

    def commit(self, slot: int, store: str, length: int) -> None:
        """Make the rows before `length` of a store part of the sequence, and none behind."""
        parking = self.stores[store].parking
        if parking is not None:
            parking.commit(slot, length)
        rows = self._entries[slot].rows
        rows[store] = range(rows[store].start, length)

    def restart(self, slot: int, store: str, n_tokens: int) -> None:
        """Forget the rows of a store, which goes on at the first page border from `n_tokens` on."""
        entry, start = self._entries[slot], -(-n_tokens // self.page_size) * self.page_size
        entry.rows[store] = range(start, start)
        entry.offered = ()
        self.stores[store].reset(slot, start)

    def recover(self, slot: int) -> int:
        """A pass of the target broke off: recurrent states may have moved in some layers and not in others.

        Returns the target's length, which is what it was unless there is such state. Other stores stay as they are:
        what they hold is of the same tokens, and the target will be fed these again before it goes on.
        """
        if self.stores[self.primary].parking is not None:
            self._resume(slot, self.primary)
        return self.length(slot, self.primary)

    def _resume(self, slot: int, name: str) -> None:
        """Set a recurrent store to the last snapshot of the slot's tokens within its rows, or to nothing."""
        entry, store, size = self._entries[slot], self.stores[name], self.page_size
        start, end = entry.rows[name].start, entry.rows[name].stop
        for n_pages in range(min(len(entry.keys), end // size), start // size, -1):
            states = self.snapshots.find((name, entry.keys[n_pages - 1]))
            if states is not None:
                entry.rows[name] = range(start, n_pages * size)
                store.restore(slot, states, n_pages * size)
                return
        entry.rows[name] = range(start, start)
        store.reset(slot, start)

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
        last = (n_prompt - 1) // self.page_size * self.page_size
        border = (start // stride + 1) * stride
        return last if start < last < border else border

    def publish(self, slot: int, tokens: Sequence[int], n_prompt: int) -> None:
        """Offer the slot's full pages to other slots, each for the stores whose rows in it are complete."""
        entry = self._entries[slot]
        size = self.page_size
        offered = tuple(range(rows.start // size, rows.stop // size) for rows in entry.rows.values())
        if offered == entry.offered:
            return
        entry.offered = offered
        n_full = max(pages.stop for pages in offered)
        if n_full > len(entry.keys):
            fresh = prefix_keys(tokens, size, entry.salt, entry.images, entry.keys)
            entry.keys += list(islice(fresh, n_full - len(entry.keys)))
        for i in range(self.length(slot, self.primary) // size):
            page = self.pool.pages[entry.table[i]]
            complete = {name for name, pages in zip(entry.rows, offered, strict=True) if i in pages}
            if page.key is None or not complete <= page.complete:
                self.pool.publish(entry.table[i], entry.keys[i], complete)
        for name, store in self.stores.items():
            if store.windows is not None:
                store.windows.publish(slot, entry.keys, entry.rows[name].stop)
            self._snapshot(slot, name, n_prompt)

    def _snapshot(self, slot: int, name: str, n_prompt: int) -> None:
        """Take the snapshots that the store has come to since the last publish.

        Parked rows are folded one border at a time, so that a draft may run over a border.
        """
        store, entry = self.stores[name], self._entries[slot]
        if store.parking is None or self._strides[name] is None:
            return
        rows = entry.rows[name]
        # The state may stand on a border; on its first it is that of no token.
        start, end = max(rows.start, store.parking.length(slot) - 1), rows.stop
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
        entry.rows = dict.fromkeys(self.stores, range(0))


def _last_run(marks: Sequence[bool]) -> range:
    """Where the last run of marks lies; empty, at 0, if there is none."""
    end = max((i + 1 for i, mark in enumerate(marks) if mark), default=0)
    start = max((i + 1 for i, mark in enumerate(marks[:end]) if not mark), default=0)
    return range(start, end)
