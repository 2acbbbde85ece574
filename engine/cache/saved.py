"""A published prefix copied out of the cache (`save`), put back as if just computed (`load`), or forgotten (`erase`).

What a slot has computed outlives its request as published pages and as snapshots on their borders, so this reads and
writes those, never a slot. Nothing here touches files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.held import PageKind, Shape
from slipstream.engine.cache.pages import PagePool, prefix_keys
from slipstream.engine.cache.store import Store
from slipstream.engine.cache.window import OFFERED
from slipstream.engine.images import ImageMark, Marked

Place = tuple[str, int]  # (store, tokens before the border)


@dataclass(frozen=True, slots=True)
class SavedWindow:
    """Pages of layers with a window, those that live: page numbers[i] of the prefix is row i of each tensor."""

    numbers: Sequence[int]
    rows: Sequence[Tensor]  # as `Held.pages`, [len(numbers), ...] each


@dataclass(frozen=True, slots=True)
class Saved:
    """A prefix in host memory. Its tensors are not to be written: some are the cache's own."""

    tokens: Sequence[int]  # of whole pages
    complete: Mapping[str, range]  # per store: the pages that are valid for it
    rows: Mapping[str, Sequence[Tensor]]  # per store, as `Held.pages`: [len(complete), ...] each
    windows: Mapping[str, SavedWindow]  # per store that has windows
    states: Mapping[Place, Sequence[Tensor]]  # snapshots, as `Store.snapshot` gives them
    images: Sequence[ImageMark] = ()  # that begin among the tokens


def save(cache: Cache, tokens: Sequence[int], salt: str, images: Sequence[Marked] = ()) -> Saved:
    """A copy of what the cache holds of `tokens`, as far as a sequence could be resumed from it."""
    keys, page_ids = cache.pool.prefix(prefix_keys(tokens, cache.page_size, salt, images))
    complete = cache.resumable(keys, page_ids)
    states: dict[Place, Sequence[Tensor]] = {}
    windows: dict[str, SavedWindow] = {}
    for name, store in cache.stores.items():
        for number in complete[name]:
            found = cache.snapshots.find((name, keys[number]))
            if found is not None:
                states[name, (number + 1) * cache.page_size] = found
        if store.windows is not None:
            windows[name] = _save_window(store, store.windows.pool, keys[: complete[name].stop])
    n_tokens = complete[cache.primary].stop * cache.page_size
    return Saved(
        tokens=list(tokens[:n_tokens]),
        complete=complete,
        rows={
            name: store.held.pages("full", [page_ids[number] for number in complete[name]])
            for name, store in cache.stores.items()
        },
        windows=windows,
        states=states,
        images=[ImageMark.of(one) for one in images if one.start < n_tokens],
    )


def _save_window(store: Store, pool: PagePool, keys: Sequence[bytes]) -> SavedWindow:
    """All pages that live, not only the last window's: from the others a prompt that ends earlier is resumed."""
    live = {number: page_id for number, key in enumerate(keys) if (page_id := pool.find(key)) is not None}
    return SavedWindow(list(live), store.held.pages("window", list(live.values())))


def fits(cache: Cache, saved: Saved) -> bool:
    """Whether a prefix has the stores, shapes and dtypes of this cache."""
    n_pages, rest = divmod(len(saved.tokens), cache.page_size)
    windowed = {name for name, store in cache.stores.items() if store.windows is not None}
    names = cache.stores.keys()
    if rest or not names == saved.complete.keys() == saved.rows.keys() or windowed != saved.windows.keys():
        return False
    if any(not 0 <= pages.start <= pages.stop <= n_pages for pages in saved.complete.values()):
        return False
    stores = cache.stores.items()
    if not all(
        _alike(saved.rows[name], one.held.page_shapes("full"), len(saved.complete[name]))
        for name, one in stores
    ):
        return False
    for name, window in saved.windows.items():
        n = saved.complete[name].stop
        if not _alike(window.rows, cache.stores[name].held.page_shapes("window"), len(window.numbers)):
            return False
        if list(window.numbers) != sorted({one for one in window.numbers if 0 <= one < n}):
            return False
    for (name, n), states in saved.states.items():
        on_border = 0 < n <= len(saved.tokens) and n % cache.page_size == 0
        if name not in names or not on_border:
            return False
        if _kinds(states) != cache.stores[name].held.slot_shapes:
            return False
    return True


def _alike(rows: Sequence[Tensor], kinds: Sequence[Shape], n_pages: int) -> bool:
    """Whether these are the rows of so many pages of the cache."""
    return _kinds(rows) == [((n_pages, *shape), dtype) for shape, dtype in kinds]


def _kinds(tensors: Sequence[Tensor]) -> list[Shape]:
    return [(tuple(one.shape), one.dtype) for one in tensors]


def load(cache: Cache, saved: Saved, salt: str) -> None:
    """Publish a prefix that `fits`; the first pages of it if there is not room for all.

    Afterwards it lies in the prefix cache, held by no slot, as the most recently used prefix. Cached prefixes make room
    for it, pages that slots hold do not.
    """
    keys = list(prefix_keys(saved.tokens, cache.page_size, salt, saved.images))
    offers = [
        (key, {name for name in cache.stores if number in saved.complete[name]})
        for number, key in enumerate(keys)
    ]

    def write(fresh: Mapping[int, int]) -> None:
        for name, store in cache.stores.items():
            pages = saved.complete[name]
            mine = {number - pages.start: one for number, one in fresh.items() if number in pages}
            _write(store, "full", mine, saved.rows[name])

    n_pages = _publish(cache.pool, offers, write)
    for name, window in saved.windows.items():
        _load_window(cache.stores[name], window, keys[:n_pages])
    for (name, n_tokens), states in sorted(saved.states.items(), key=lambda one: one[0]):
        if n_tokens <= n_pages * cache.page_size:
            cache.snapshots.put((name, keys[n_tokens // cache.page_size - 1]), states)


def _load_window(store: Store, window: SavedWindow, keys: Sequence[bytes]) -> None:
    """Publish the pages of a window; the last pages if there is not room for all: those are resumed from."""
    assert store.windows is not None
    pool = store.windows.pool
    rows_of = [row for row, number in enumerate(window.numbers) if number < len(keys)]
    rows_of = rows_of[max(0, len(rows_of) - pool.n_available) :]

    def write(fresh: Mapping[int, int]) -> None:
        mine = {rows_of[i]: page_id for i, page_id in fresh.items()}
        _write(store, "window", mine, window.rows)

    _publish(pool, [(keys[window.numbers[row]], OFFERED) for row in rows_of], write)


def _publish(
    pool: PagePool, offers: Sequence[tuple[bytes, set[str]]], write: Callable[[Mapping[int, int]], None]
) -> int:
    """Make pages live under their keys, each complete for some stores; returns how many, from the first offer on.

    write: fills the pages that have to be made, given as {number of the offer: page id}. If it raises, nothing has
    been published.
    """
    held: list[int] = []  # so that taking the next page does not evict the page before
    fresh: dict[int, int] = {}
    try:
        for number, (key, complete) in enumerate(offers):
            known = pool.find(key)
            if known is not None and complete <= pool.pages[known].complete:
                pool.hold(known)
                held.append(known)
            elif pool.n_available:
                fresh[number] = pool.take()
                held.append(fresh[number])
            else:
                break
        write(fresh)
        for number, page_id in fresh.items():
            pool.publish(page_id, offers[number][0], offers[number][1])
    finally:
        for page_id in reversed(held):  # the last page goes first when cached pages are taken back
            pool.release(page_id)
    return len(held)


def _write(store: Store, kind: PageKind, page_of: Mapping[int, int], rows: Sequence[Tensor]) -> None:
    """Fill pages: page page_of[i] with row i of each stored tensor."""
    store.held.set_pages(kind, list(page_of.values()), [one[list(page_of)] for one in rows])


def erase(
    cache: Cache, tokens: Sequence[int], salt: str, images: Sequence[Marked] = (), *, held: bool = False
) -> int:
    """Withdraw what is cached of `tokens`; returns the number of tokens. held: pages that a slot holds too."""
    n_pages = 0
    for key in prefix_keys(tokens, cache.page_size, salt, images):
        page_id = cache.pool.find(key)
        if page_id is not None and cache.pool.pages[page_id].n_holders and not held:
            continue
        if page_id is not None:
            cache.pool.withdraw(page_id)
            n_pages += 1
        for name, store in cache.stores.items():
            cache.snapshots.discard((name, key))
            if store.windows is not None:
                _withdraw(store.windows.pool, key, held=held)
    return n_pages * cache.page_size


def _withdraw(pool: PagePool, key: bytes, *, held: bool) -> None:
    """Take out what lies under a key, unless a slot holds it; held: also then."""
    page_id = pool.find(key)
    if page_id is not None and (held or not pool.pages[page_id].n_holders):
        pool.withdraw(page_id)
