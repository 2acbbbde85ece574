"""Page ids, reference counts and the prefix index.

A page is *held* by the slots whose tables name it, *cached* when only the prefix index names it, else *free*.
Cached pages are taken back least recently used first; eviction touches no others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from slipstream.engine.images import Marked


@dataclass(slots=True)
class Page:
    """The pool's record of one page. `complete` names the stores whose rows in it are all valid."""

    n_holders: int = 0
    key: bytes | None = None
    complete: set[str] = field(default_factory=set)


class PagePool:
    """All pages of the engine, shared by all slots and all stores."""

    def __init__(self, n_pages: int) -> None:
        self.pages = [Page() for _ in range(n_pages)]
        self._free = list(range(n_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[bytes, int] = {}

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_cached(self) -> int:
        return len(self._cached)

    @property
    def n_held(self) -> int:
        return len(self.pages) - self.n_free - self.n_cached

    @property
    def n_available(self) -> int:
        """Pages `take` can give: free ones, then cached ones at the price of a prefix."""
        return self.n_free + self.n_cached

    def take(self) -> int:
        """A page with one holder and no content. The caller has checked `n_available`."""
        if self._free:
            page_id = self._free.pop()
        else:
            page_id, _ = self._cached.popitem(last=False)
            self.withdraw(page_id)
        self.pages[page_id].n_holders = 1
        return page_id

    def hold(self, page_id: int) -> None:
        """Add a holder to a held or cached page."""
        self._cached.pop(page_id, None)
        self.pages[page_id].n_holders += 1

    def release(self, page_id: int) -> None:
        """Remove a holder; after the last, the page is cached if it is in the index, else free."""
        page = self.pages[page_id]
        page.n_holders -= 1
        if page.n_holders == 0:
            if page.key is not None:
                self._cached[page_id] = None
            else:
                page.complete.clear()
                self._free.append(page_id)

    def find(self, key: bytes) -> int | None:
        """The page published under a prefix key."""
        return self._index.get(key)

    def prefix(self, keys: Iterable[bytes]) -> tuple[list[bytes], list[int]]:
        """Keys and pages of the longest published prefix. keys: of a sequence's full pages, in order."""
        found = list(takewhile(self._index.__contains__, keys))
        return found, [self._index[key] for key in found]

    def publish(self, page_id: int, key: bytes, complete: set[str]) -> None:
        """Offer a page under its key. Of two pages with the same key, the page complete for more stores stays."""
        page = self.pages[page_id]
        page.complete |= complete
        other = self._index.get(key)
        if other is not None and other != page_id:
            if len(self.pages[other].complete) >= len(page.complete):
                return
            self.withdraw(other)
        page.key = key
        self._index[key] = page_id

    def withdraw(self, page_id: int) -> None:
        """Take a page out of the index; it is freed if no slot holds it."""
        page = self.pages[page_id]
        if page.key is not None:
            del self._index[page.key]
            page.key = None
        page.complete.clear()
        if page_id in self._cached:
            del self._cached[page_id]
            self._free.append(page_id)


def prefix_keys(
    tokens: Sequence[int],
    page_size: int,
    salt: str,
    images: Sequence[Marked] = (),
    known: Sequence[bytes] = (),
) -> Iterator[bytes]:
    """Chained SHA-256 keys of the full pages of `tokens`, from the first on that is not known.

    A key stands for every token up to its page's end, and for all images that begin before it: an image's token ids are
    those of any other of its size, and its first rows may depend on its last. It is salted per tenant, so that one API
    key cannot learn from response times what another key asked.
    """
    key = known[-1] if known else hashlib.sha256(salt.encode()).digest()
    for start in range(len(known) * page_size, len(tokens) - page_size + 1, page_size):
        end = start + page_size
        page = np.asarray(tokens[start:end], dtype=np.int64)
        shown = b"".join(
            one.start.to_bytes(8, "little") + one.key for one in images if one.start < end and one.end > start
        )
        key = hashlib.sha256(key + page.tobytes() + shown).digest()
        yield key
