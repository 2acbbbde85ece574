"""One page table and one length per store for every slot: all the engine calls of the cache.

Tokens are the truth; what is here can be dropped and rebuilt from them. A store's rows past its own length are
scratch: whoever drafts or verifies may write them, nobody may read them later. Lengths move by `commit` alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from engine.cache.kv import KVStore
from engine.cache.pages import PagePool, prefix_keys


@dataclass(slots=True)
class _Entry:
    """A slot's pages, the valid length of each store, and the keys of its full pages so far."""

    salt: str = ""
    table: list[int] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    offered: tuple[int, ...] = ()  # full pages per store at the last publish


class Cache:
    """Page tables of all slots over the K/V stores of the target and the draft networks."""

    def __init__(
        self,
        stores: Mapping[str, KVStore],
        n_slots: int,
        n_pages: int,
        page_size: int,
        followers: Collection[str] = (),
    ) -> None:
        """`stores` names one store per network; the first is the target's.

        followers: stores whose rows can only be made while the target computes the same tokens. A prefix is adopted
        as far as it is complete for them too, or they would have a gap for ever.
        """
        self.stores = dict(stores)
        self.page_size = page_size
        self.pool = PagePool(n_pages)
        self._primary = next(iter(self.stores))
        self._followers = frozenset(followers)
        self._entries = [_Entry(lengths=dict.fromkeys(self.stores, 0)) for _ in range(n_slots)]

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
        for name in self.stores:
            pages = [name in self.pool.pages[page_id].complete for page_id in entry.table]
            n_complete = pages.index(False) if False in pages else len(pages)
            entry.lengths[name] = n_complete * size
        if self._followers:
            self.rollback(slot, min(entry.lengths[name] for name in (self._primary, *self._followers)))
        return entry.lengths[self._primary]

    def length(self, slot: int, store: str) -> int:
        """Tokens of the slot whose rows in the store are valid."""
        return self._entries[slot].lengths[store]

    def table(self, slot: int) -> Sequence[int]:
        """The slot's page ids in order of position."""
        return self._entries[slot].table

    def reserve(self, slot: int, store: str, start: int, end: int) -> bool:
        """Make positions [start, end) writable for a store: enough pages, each held by this slot alone.

        A shared page is copied first. Changes nothing and returns False when the pool cannot give the pages.
        """
        entry = self._entries[slot]
        size = self.page_size
        known = range(start // size, min(len(entry.table), -(-end // size)))
        shared = [i for i in known if self.pool.pages[entry.table[i]].n_holders > 1]
        n_new = max(0, -(-end // size) - len(entry.table))
        if n_new + len(shared) > self.pool.n_available:
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
        """Make the rows before `length` of a store part of the sequence."""
        self._entries[slot].lengths[store] = length

    def rollback(self, slot: int, n_tokens: int) -> int:
        """Shorten every store to at most `n_tokens`; return the target's length."""
        entry = self._entries[slot]
        n_pages = -(-n_tokens // self.page_size)
        for page_id in entry.table[n_pages:]:
            self.pool.release(page_id)
        del entry.table[n_pages:]
        del entry.keys[n_tokens // self.page_size :]
        entry.offered = ()
        for name, length in entry.lengths.items():
            entry.lengths[name] = min(length, n_tokens)
        return entry.lengths[self._primary]

    def publish(self, slot: int, tokens: Sequence[int]) -> None:
        """Offer the slot's full pages to other slots, each for the stores whose rows in it are complete."""
        entry = self._entries[slot]
        size = self.page_size
        offered = tuple(length // size for length in entry.lengths.values())
        if offered == entry.offered:
            return
        entry.offered = offered
        n_full = entry.lengths[self._primary] // size
        if n_full > len(entry.keys):
            parent = entry.keys[-1] if entry.keys else None
            fresh = tokens[len(entry.keys) * size : n_full * size]
            entry.keys.extend(prefix_keys(fresh, size, entry.salt, parent))
        for i in range(n_full):
            page = self.pool.pages[entry.table[i]]
            complete = {name for name, length in entry.lengths.items() if length >= (i + 1) * size}
            if page.key is None or not complete <= page.complete:
                self.pool.publish(entry.table[i], entry.keys[i], complete)

    def drop(self, slot: int) -> None:
        """Forget the slot's state; the tokens remain with their owner, published pages with the pool."""
        entry = self._entries[slot]
        for page_id in reversed(entry.table):  # the last page goes first when cached pages are taken back
            self.pool.release(page_id)
        entry.table.clear()
        entry.keys.clear()
        entry.offered = ()
        entry.lengths = dict.fromkeys(self.stores, 0)
