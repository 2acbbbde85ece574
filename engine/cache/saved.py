"""A published prefix outside of the cache: taken out whole, put back as if it had just been computed, or forgotten.

What a slot has computed outlives its request as published pages and as snapshots on their borders, so this reads and
writes those, never a slot. Nothing here touches files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.cache.cache import Cache
from engine.cache.pages import prefix_keys

Place = tuple[str, int]  # (store, tokens before the border)


@dataclass(frozen=True, slots=True)
class Saved:
    """A prefix in host memory."""

    tokens: Sequence[int]  # of whole pages
    complete: Mapping[str, int]  # per store: its first pages that are valid for it
    rows: Mapping[str, Sequence[Tensor]]  # per store, as `Store.read_pages` gives them: [complete, ...] each
    states: Mapping[Place, Sequence[Tensor]]  # snapshots, as `Store.snapshot` gives them


def save(cache: Cache, tokens: Sequence[int], salt: str) -> Saved:
    """A copy of what the cache holds of `tokens`, as far as a sequence could be resumed from it."""
    keys, page_ids = [], []
    for key in prefix_keys(tokens, cache.page_size, salt):
        page_id = cache.pool.find(key)
        if page_id is None:
            break
        keys.append(key)
        page_ids.append(page_id)
    complete = _resumable(cache, keys, page_ids)
    n_pages = complete[_primary(cache)]
    return Saved(
        tokens=list(tokens[: n_pages * cache.page_size]),
        complete=complete,
        rows={name: store.read_pages(page_ids[: complete[name]]) for name, store in cache.stores.items()},
        states={
            (name, n * cache.page_size): states
            for name in cache.stores
            for n in range(1, complete[name] + 1)
            if (states := cache.snapshots.find((name, keys[n - 1]))) is not None
        },
    )


def _resumable(cache: Cache, keys: Sequence[bytes], page_ids: Sequence[int]) -> dict[str, int]:
    """Per store the pages that `Cache.begin` would adopt of these."""
    known = [cache.pool.pages[page_id].complete for page_id in page_ids]
    complete = {}
    for name in cache.stores:
        gaps = (n for n, stores in enumerate(known) if name not in stores)
        complete[name] = next(gaps, len(known))
    n_pages = min(complete[name] for name in (_primary(cache), *cache.followers))
    for name, store in cache.stores.items():
        complete[name] = min(complete[name], n_pages)
        if store.parking is not None:
            stored = [n for n in range(1, complete[name] + 1) if (name, keys[n - 1]) in cache.snapshots]
            complete[name] = max(stored, default=0)
        n_pages = complete[_primary(cache)]  # which comes first, and has the last word
    return complete


def _primary(cache: Cache) -> str:
    """The target's store."""
    return next(iter(cache.stores))


def fits(cache: Cache, saved: Saved) -> bool:
    """Whether a prefix has the stores, shapes and dtypes of this cache."""
    n_pages, rest = divmod(len(saved.tokens), cache.page_size)
    if rest or saved.complete.keys() != cache.stores.keys() or saved.rows.keys() != cache.stores.keys():
        return False
    for name, store in cache.stores.items():
        n = saved.complete[name]
        wanted = [((n, *one.shape[1:]), one.dtype) for one in store.page_tensors]
        if not 0 <= n <= n_pages or wanted != _kinds(saved.rows[name]):
            return False
    kinds = {name: _kinds(store.slot_tensors) for name, store in cache.stores.items()}
    return all(
        name in kinds
        and kinds[name] == _kinds(states)
        and 0 < n <= len(saved.tokens)
        and n % cache.page_size == 0
        for (name, n), states in saved.states.items()
    )


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], object]]:
    return [(tuple(one.shape), one.dtype) for one in tensors]


def load(cache: Cache, saved: Saved, salt: str) -> None:
    """Publish a prefix that `fits`; the first pages of it if there is not room for all.

    It lies in the prefix cache afterwards, held by nobody, as the one used last. Cached prefixes make room for it,
    pages that slots hold do not.
    """
    pool = cache.pool
    keys = list(prefix_keys(saved.tokens, cache.page_size, salt))
    held: list[int] = []  # so that taking the next page does not evict the one before
    fresh: dict[int, set[str]] = {}  # number of the page in the prefix -> stores whose rows it brings
    try:
        for number, key in enumerate(keys):
            brings = {name for name in cache.stores if number < saved.complete[name]}
            known = pool.find(key)
            if known is not None and brings <= pool.pages[known].complete:
                pool.hold(known)
                held.append(known)
            elif pool.n_available:
                held.append(pool.take())
                fresh[number] = brings
            else:
                break
        for name, store in cache.stores.items():
            numbers = [number for number in fresh if name in fresh[number]]
            if numbers:
                rows = [one[numbers] for one in saved.rows[name]]
                store.write_pages([held[number] for number in numbers], rows)
        for number, brings in fresh.items():
            pool.publish(held[number], keys[number], brings)
    finally:
        for page_id in reversed(held):  # the last page goes first when cached pages are taken back
            pool.release(page_id)
    for (name, n_tokens), states in sorted(saved.states.items(), key=lambda one: one[0]):
        if n_tokens <= len(held) * cache.page_size:
            cache.snapshots.put((name, keys[n_tokens // cache.page_size - 1]), states)


def erase(cache: Cache, tokens: Sequence[int], salt: str) -> int:
    """Withdraw what is cached of `tokens`, but for pages that a slot holds; returns the number of tokens."""
    n_pages = 0
    for key in prefix_keys(tokens, cache.page_size, salt):
        page_id = cache.pool.find(key)
        if page_id is not None and cache.pool.pages[page_id].n_holders:
            continue
        if page_id is not None:
            cache.pool.withdraw(page_id)
            n_pages += 1
        for name in cache.stores:
            cache.snapshots.discard((name, key))
    return n_pages * cache.page_size
