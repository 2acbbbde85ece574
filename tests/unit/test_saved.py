"""Published prefixes out of one cache and into another, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from slipstream.engine.cache import saved
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.kv import KV
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.pages import prefix_keys
from slipstream.engine.cache.saved import Saved
from slipstream.engine.cache.snapshots import Snapshots
from slipstream.engine.cache.store import Store

SIZE = 4
TOKENS = list(range(1, 22))  # five full pages and a token


def make_cache(n_pages: int = 8, n_window_pages: int = 8, *, window: int = 0) -> Cache:
    sizes = Sizes(n_slots=2, n_pages=n_pages, page_size=SIZE, n_window_pages=n_window_pages)
    needs = [KV(1, 2), *([KV(1, 2, window)] if window else [])]
    stores = {name: Store(needs, sizes, torch.float32, torch.device("cpu")) for name in ("target", "draft")}
    return Cache(stores, 2, n_pages, SIZE)


def fill(cache: Cache, tokens: Sequence[int] = TOKENS, salt: str = "", n_draft: int | None = None) -> None:
    """A request from beginning to end; each row holds its own token, the draft's its negative."""
    n_past = cache.begin(0, tokens, salt)
    for name, sign, end in (("target", 1.0, len(tokens)), ("draft", -1.0, n_draft)):
        end = len(tokens) if end is None else end
        store = cache.stores[name]
        assert cache.reserve(0, name, n_past, end)
        for layer, table in zip(store.layers, tables(cache, 0, name), strict=False):
            for position in range(n_past, end):
                layer.keys[table[position // SIZE], 0, position % SIZE] = sign * tokens[position]
                layer.values[table[position // SIZE], 0, position % SIZE] = sign * tokens[position] + 0.5
        cache.commit(0, name, end)
    cache.publish(0, tokens, len(tokens))
    cache.drop(0)


def tables(cache: Cache, slot: int, name: str) -> list[Sequence[int]]:
    """Of the full layer and of the one with a window."""
    windows = cache.stores[name].windows
    return [cache.table(slot), *([windows.table(slot)] if windows is not None else [])]


def adopted(cache: Cache, tokens: Sequence[int] = TOKENS, salt: str = "") -> int:
    """How much a request gets from the cache; every row it gets must be the right one."""
    n_past = cache.begin(1, tokens, salt)
    for name, sign in (("target", 1.0), ("draft", -1.0)):
        store = cache.stores[name]
        for layer, table in zip(store.layers, tables(cache, 1, name), strict=True):
            windows = store.windows
            first = 0 if layer is store.layers[0] or windows is None else max(0, n_past - windows.window + 1)
            for position in range(first, cache.length(1, name)):
                page_id = table[position // SIZE]
                assert float(layer.keys[page_id, 0, position % SIZE, 1]) == sign * tokens[position]
                assert float(layer.values[page_id, 0, position % SIZE, 0]) == sign * tokens[position] + 0.5
    cache.drop(1)
    return n_past


def taken(cache: Cache, tokens: Sequence[int] = TOKENS, salt: str = "") -> Saved:
    found = saved.save(cache, tokens, salt)
    assert saved.fits(cache, found)
    return found


def counts(cache: Cache) -> tuple[int, int, int]:
    return cache.pool.n_free, cache.pool.n_cached, cache.pool.n_held


def test_whole_pages_go_from_one_cache_to_another() -> None:
    old, new = make_cache(), make_cache()
    fill(old)
    found = taken(old)
    assert found.tokens == TOKENS[:20]
    assert found.complete == {"target": range(5), "draft": range(5)}
    saved.load(new, found, "")
    assert counts(new) == (3, 5, 0)
    assert adopted(new) == 20


def test_nothing_is_found_of_other_tokens_or_tenants() -> None:
    cache = make_cache()
    fill(cache, salt="alice")
    assert taken(cache, salt="bob").tokens == []
    assert taken(cache, [9, *TOKENS], "alice").tokens == []
    assert taken(cache, TOKENS[:3], "alice").tokens == []
    found = taken(cache, salt="alice")
    assert saved.erase(cache, TOKENS, "bob") == 0
    new = make_cache()
    saved.load(new, found, "alice")
    assert adopted(new, salt="bob") == 0
    assert adopted(new, salt="alice") == 20


def test_a_lagging_draft_keeps_its_own_length() -> None:
    old, new = make_cache(), make_cache()
    fill(old, n_draft=9)
    found = taken(old)
    assert found.complete == {"target": range(5), "draft": range(2)}
    saved.load(new, found, "")
    assert adopted(new) == 20
    new.begin(1, TOKENS, "")
    assert new.length(1, "draft") == 8


def test_rows_that_begin_later_are_saved_from_there() -> None:
    old, new = make_cache(), make_cache()
    fill(old, n_draft=0)
    old.begin(0, TOKENS, "")
    keys = old.stores["draft"].layers[0].keys
    old.restart(0, "draft", 5)
    assert old.reserve(0, "draft", 8, 16)
    for position in range(8, 16):
        keys[old.table(0)[position // SIZE], 0, position % SIZE] = -TOKENS[position]
    old.commit(0, "draft", 16)
    old.publish(0, TOKENS, len(TOKENS))
    found = taken(old)
    assert found.complete == {"target": range(5), "draft": range(2, 4)}
    saved.load(new, found, "")
    assert new.begin(1, TOKENS, "") == 20
    assert (new.start(1, "draft"), new.length(1, "draft")) == (8, 16)
    keys = new.stores["draft"].layers[0].keys
    for position in range(8, 16):
        assert float(keys[new.table(1)[position // SIZE], 0, position % SIZE, 0]) == -TOKENS[position]


def test_a_gap_ends_the_prefix() -> None:
    cache = make_cache()
    fill(cache)
    keys = list(prefix_keys(TOKENS, SIZE, ""))
    page_id = cache.pool.find(keys[2])
    assert page_id is not None
    cache.pool.withdraw(page_id)
    assert taken(cache).tokens == TOKENS[:8]
    assert saved.erase(cache, TOKENS, "") == 16, "what lies behind the gap is withdrawn too"
    assert counts(cache) == (8, 0, 0)


def test_more_than_there_is_room_for_is_restored_from_the_front() -> None:
    old = make_cache()
    fill(old)
    found = taken(old)
    new = make_cache(n_pages=3)
    saved.load(new, found, "")
    assert adopted(new) == 12
    assert counts(new) == (0, 3, 0)


def test_cached_prefixes_make_room_and_held_pages_do_not() -> None:
    old, new = make_cache(), make_cache(n_pages=6)
    fill(old)
    others = [100 + i for i in range(17)]
    new.begin(0, others[:8], "")
    assert new.reserve(0, "target", 0, 8)
    new.commit(0, "target", 8)
    held = list(new.table(0))
    saved.load(new, taken(old), "")
    assert new.table(0) == held
    assert adopted(new) == 16
    assert counts(new) == (0, 4, 2)
    new.drop(0)
    fill(new, others)
    saved.load(new, taken(old), "")
    assert adopted(new) == 20


def test_pages_that_are_there_are_not_made_twice() -> None:
    cache = make_cache()
    fill(cache)
    found = taken(cache)
    saved.load(cache, found, "")
    assert counts(cache) == (3, 5, 0)
    assert adopted(cache) == 20


def test_pages_that_lack_a_store_are_replaced() -> None:
    old, new = make_cache(), make_cache()
    fill(old)
    fill(new, n_draft=0)
    saved.load(new, taken(old), "")
    new.begin(1, TOKENS, "")
    assert new.length(1, "draft") == 20
    assert counts(new) == (3, 0, 5)


def test_a_failed_copy_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_cache(), make_cache()
    fill(old)

    def fail(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(saved, "_write", fail)
    with pytest.raises(MemoryError):
        saved.load(new, taken(old), "")
    assert counts(new) == (8, 0, 0)
    assert adopted(new) == 0


def test_erase_spares_what_a_slot_holds() -> None:
    cache = make_cache()
    fill(cache)
    assert cache.begin(1, TOKENS[:9], "") == 8
    assert saved.erase(cache, TOKENS, "") == 12
    assert counts(cache) == (6, 0, 2)
    cache.drop(1)
    assert adopted(cache) == 8


def test_a_restored_prefix_is_the_last_to_be_evicted_and_from_its_end() -> None:
    old, new = make_cache(), make_cache(n_pages=8)
    others = [100 + i for i in range(9)]
    fill(new, others)
    fill(old)
    saved.load(new, taken(old), "")
    assert [new.pool.take() for _ in range(4)]  # one that is free, two of the others, one of these
    assert adopted(new, others) == 0
    assert adopted(new) == 16


def test_windows_come_along() -> None:
    old, new = make_cache(window=6), make_cache(window=6)
    fill(old)
    found = taken(old)
    assert found.windows["target"].numbers == [0, 1, 2, 3, 4]
    saved.load(new, found, "")
    assert adopted(new) == 20
    assert adopted(new, TOKENS[:12]) == 8, "a prompt that ends earlier has its window too"
    assert saved.erase(new, TOKENS, "") == 20
    for store in new.stores.values():
        assert store.windows is not None
        assert store.windows.pool.n_free == 8


def test_of_a_window_without_room_the_end_is_restored() -> None:
    old, new = make_cache(window=6), make_cache(n_window_pages=2, window=6)
    fill(old)
    saved.load(new, taken(old), "")
    assert adopted(new) == 20
    tight = make_cache(n_window_pages=1, window=6)
    saved.load(tight, taken(old), "")
    assert adopted(tight) == 0
    shorter = make_cache(n_pages=3, n_window_pages=2, window=6)
    saved.load(shorter, taken(old), "")
    assert adopted(shorter) == 12, "the window before what fits"


def test_a_window_that_has_gone_ends_the_prefix() -> None:
    cache = make_cache(window=6)
    fill(cache)
    windows = cache.stores["target"].windows
    assert windows is not None
    key = list(prefix_keys(TOKENS, SIZE, ""))[4]
    page_id = windows.pool.find(key)
    assert page_id is not None
    windows.pool.withdraw(page_id)
    assert taken(cache).complete == {"target": range(4), "draft": range(4)}


def test_only_what_has_the_caches_shapes_fits() -> None:
    cache = make_cache(window=6)
    fill(cache)
    found = taken(cache)
    rows, window = found.rows["target"], found.windows["target"]
    states = [torch.zeros(2)]
    for wrong in (
        replace(found, tokens=found.tokens[:-1]),
        replace(found, tokens=found.tokens[:-4]),
        replace(found, complete={"target": range(5)}),
        replace(found, complete={"target": range(6), "draft": range(5)}),
        replace(found, complete={"target": range(-1, 4), "draft": range(5)}),
        replace(found, rows={"target": rows}),
        replace(found, rows={**found.rows, "target": rows[:1]}),
        replace(found, rows={**found.rows, "target": [one.double() for one in rows]}),
        replace(found, rows={**found.rows, "target": [one[:, :, :2] for one in rows]}),
        replace(found, rows={**found.rows, "target": [one[:4] for one in rows]}),
        replace(found, windows={}),
        replace(found, windows={**found.windows, "target": replace(window, numbers=[0, 1, 2, 3, 5])}),
        replace(found, windows={**found.windows, "target": replace(window, numbers=[1, 0, 2, 3, 4])}),
        replace(found, windows={**found.windows, "target": replace(window, numbers=[0, 1])}),
        replace(found, states={("target", 20): states}),
        replace(found, states={("other", 20): []}),
        replace(found, states={("target", 18): []}),
        replace(found, states={("target", 24): []}),
    ):
        assert not saved.fits(cache, wrong)
    assert not saved.fits(make_cache(), found)


def test_forgotten_snapshots_make_room() -> None:
    snapshots = Snapshots(32)
    snapshots.put(("target", b"a"), [torch.zeros(4)])
    snapshots.put(("target", b"b"), [torch.zeros(4)])
    snapshots.discard(("target", b"a"))
    snapshots.discard(("target", b"never"))
    snapshots.put(("target", b"c"), [torch.zeros(4)])
    assert snapshots.n_bytes == 32
    assert ("target", b"b") in snapshots
    assert ("target", b"a") not in snapshots
