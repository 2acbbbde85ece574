"""Pages of layers that look back over a window only: a slot holds those of its window and of the pass at hand.

They are numbered apart from the pages of full layers and lie in a pool of their own, one per network. A page is given
back when the committed length has left its last position behind the window, after it was offered to other slots. It
may then be taken for something else, so a stored prefix serves only while the pages of its last `window` tokens live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.engine.cache.pages import PagePool

# Stands in a page table for pages that were given back. It is never read: attention begins at the window.
_GONE = 0
OFFERED = {"window"}  # a page of this pool belongs to one store alone


@dataclass(slots=True)
class _Held:
    """The pages of one slot: page `first + i` of its sequence is `ids[i]`."""

    first: int = 0
    ids: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.ids)


class WindowPages:
    """Which pages hold the windows of all slots, for the layers of one network."""

    def __init__(self, n_slots: int, n_pages: int, page_size: int, window: int) -> None:
        """window: positions a row sees, its own included; the largest of the network's layers."""
        self.pool = PagePool(n_pages)
        self.window = window
        self._size = page_size
        self._held = [_Held() for _ in range(n_slots)]

    def table(self, slot: int) -> list[int]:
        """The slot's page ids in order of position; `_GONE` for pages before its window."""
        held = self._held[slot]
        return [_GONE] * held.first + held.ids

    @property
    def n_feedable(self) -> int:
        """Tokens of a slot that can always be fed at once: half of its share, the rest is for its window and drafts."""
        return len(self.pool.pages) // (2 * len(self._held)) * self._size

    def n_adoptable(self, keys: Sequence[bytes]) -> int:
        """Full pages of the longest prefix whose window lives, maybe 0. keys: of the sequence's full pages."""
        n_pages, gap = 0, -1  # gap: the last page so far that is gone
        for i, key in enumerate(keys):
            gap = i if self.pool.find(key) is None else gap
            if gap < self._first_seen((i + 1) * self._size):
                n_pages = i + 1
        return n_pages

    def adopt(self, slot: int, keys: Sequence[bytes]) -> None:
        """Hold the window at the end of a prefix that can be adopted. keys: its own. The slot holds nothing yet."""
        first = self._first_seen(len(keys) * self._size)
        adopted = [page_id for key in keys[first:] if (page_id := self.pool.find(key)) is not None]
        for page_id in adopted:
            self.pool.hold(page_id)
        self._held[slot] = _Held(first, adopted)

    def reserve(self, slot: int, start: int, end: int, copy: Callable[[int, int], None]) -> bool:
        """Make positions [start, end) writable. Returns False and changes nothing if there are too few pages.

        copy: copies the rows of one page onto another, for pages that other slots hold too.
        """
        held, size = self._held[slot], self._size
        assert held.first <= start // size <= held.end
        known = range(start // size - held.first, min(len(held.ids), -(-end // size) - held.first))
        shared = [i for i in known if self.pool.pages[held.ids[i]].n_holders > 1]
        n_new = max(0, -(-end // size) - held.end)
        if n_new + len(shared) > self.pool.n_available:
            return False
        for i in shared:
            source, held.ids[i] = held.ids[i], self.pool.take()
            copy(source, held.ids[i])
            self.pool.release(source)
        for i in known:
            self.pool.withdraw(held.ids[i])  # if it was offered: its rows are about to change
        held.ids.extend(self.pool.take() for _ in range(n_new))
        return True

    def publish(self, slot: int, keys: Sequence[bytes], length: int) -> None:
        """Offer the full pages before `length` under their keys, then give back what lies behind the window."""
        held = self._held[slot]
        for i in range(held.first, length // self._size):
            page_id = held.ids[i - held.first]
            if self.pool.pages[page_id].key is None:
                self.pool.publish(page_id, keys[i], OFFERED)
        n_behind = self._first_seen(length) - held.first
        if n_behind > 0:
            self._release(held.ids[:n_behind])
            del held.ids[:n_behind]
            held.first += n_behind

    def drop(self, slot: int, first: int = 0) -> None:
        """Give all of the slot's pages back. first: the page at which it goes on."""
        self._release(self._held[slot].ids)
        self._held[slot] = _Held(first)

    def _first_seen(self, length: int) -> int:
        """The page of the first position that the token after `length` others sees."""
        return max(0, length - self.window + 1) // self._size

    def _release(self, page_ids: Sequence[int]) -> None:
        for page_id in reversed(page_ids):  # of cached pages the last goes first
            self.pool.release(page_id)
