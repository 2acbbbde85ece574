"""Pages of layers that look back over a window: what is in them, who holds them, and how many there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from slipstream.engine.batch import Span
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.kv import KV
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.pages import prefix_keys
from slipstream.engine.cache.recurrent import Recurrent
from slipstream.engine.cache.store import Store
from slipstream.engine.cache.window import WindowPages
from slipstream.engine.errors import SettingError
from slipstream.engine.service.start import sizes
from slipstream.engine.settings import Settings

SIZE, WINDOW = 4, 6
CPU = torch.device("cpu")


def make_cache(n_slots: int = 3, n_window_pages: int = 12) -> Cache:
    """A target with a full and two sliding layers, a draft with a sliding one alone, whose window is narrower."""
    room = Sizes(n_slots=n_slots, n_pages=40, page_size=SIZE, n_window_pages=n_window_pages)
    target = Store([KV(1, 2), KV(1, 2, WINDOW), KV(1, 2, 2)], room, torch.float32, CPU)
    draft = Store([KV(1, 2, 3)], room, torch.float32, CPU)
    return Cache({"target": target, "draft": draft}, n_slots, 40, SIZE)


def pages_of(cache: Cache, store: str = "target") -> WindowPages:
    windows = cache.stores[store].windows
    assert windows is not None
    return windows


def n_held(cache: Cache, slot: int, store: str = "target") -> int:
    """Pages of the store's windows that the slot keeps from others."""
    return len(pages_of(cache, store)._held[slot].ids)


def cells(cache: Cache, store: str) -> torch.Tensor:
    """[n_window_pages, SIZE] of a store's first sliding layer."""
    layer = cache.stores[store].layers[1 if store == "target" else 0]
    keys: torch.Tensor = layer.keys[:, 0, :, 0]
    return keys


def write(cache: Cache, slot: int, store: str, tokens: list[int], start: int, end: int) -> bool:
    """Run positions [start, end) as a pass does, in the pages that its batch names."""
    if not cache.reserve(slot, store, start, end):
        return False
    batch = cache.batch(store, [Span(slot, tokens[start:end], start, 0, 0)])
    assert batch.window is not None
    cells(cache, store)[batch.window.row_pages, batch.window.row_offsets] = batch.token_ids.float()
    return True


def seen(cache: Cache, slot: int, store: str) -> list[int]:
    """What the next token's row would read of the window: the tokens before it."""
    length, window = cache.length(slot, store), pages_of(cache, store).window
    table = pages_of(cache, store).table(slot)
    positions = range(max(0, length - window + 1), length)
    return [int(cells(cache, store)[table[i // SIZE], i % SIZE]) for i in positions]


def run(cache: Cache, slot: int, tokens: list[int], salt: str = "", chunk: int = 5) -> int:
    """Take a slot through a whole sequence; return how much of it came from the prefix cache."""
    n_past = start = cache.begin(slot, tokens, salt)
    while n_past < len(tokens):
        end = min(n_past + chunk, len(tokens))
        assert write(cache, slot, "target", tokens, n_past, end)
        cache.commit(slot, "target", end)
        cache.publish(slot, tokens, len(tokens))
        n_past = end
    return start


def test_a_slot_holds_its_window_and_the_pass() -> None:
    cache, tokens = make_cache(n_window_pages=5), list(range(1, 101))
    run(cache, 0, tokens)
    assert n_held(cache, 0) == 2  # 6 positions lie on at most three pages, at 100 on two
    assert pages_of(cache).pool.n_held == 2
    assert seen(cache, 0, "target") == tokens[-(WINDOW - 1) :]
    assert len(cache.table(0)) == 25  # full layers keep everything
    assert not cache.reserve(0, "target", 100, 120)
    assert n_held(cache, 0) == 2  # what does not fit changes nothing


def test_a_page_behind_the_window_stays_until_the_commit_has_passed_it() -> None:
    """Drafts that reach far ahead may be rejected; the window of the last certain token must still be there."""
    cache, tokens = make_cache(), list(range(1, 31))
    run(cache, 0, tokens[:8])
    assert write(cache, 0, "target", tokens, 8, 30)
    assert seen(cache, 0, "target") == tokens[3:8]
    cache.commit(0, "target", 9)
    cache.publish(0, tokens[:9], 30)
    assert seen(cache, 0, "target") == tokens[4:9]
    cache.commit(0, "target", 12)
    cache.publish(0, tokens[:12], 30)
    assert pages_of(cache).table(0)[0] == 0
    assert seen(cache, 0, "target") == tokens[7:12]


def test_a_prefix_serves_while_the_pages_of_its_window_live() -> None:
    cache, tokens = make_cache(n_window_pages=8), list(range(1, 22))
    run(cache, 0, tokens)
    assert cache.begin(1, tokens, "") == 20
    assert seen(cache, 1, "target") == tokens[15:20]
    assert cache.begin(2, [*tokens[:9], 77], "") == 8
    assert seen(cache, 2, "target") == tokens[3:8]
    for slot in (0, 1, 2):
        cache.drop(slot)
    other = [-token for token in tokens]
    assert run(cache, 0, other, chunk=20) == 0  # takes pages back, the oldest prefix' first
    cache.drop(0)
    live = [pages_of(cache).pool.find(key) is not None for key in keys_of(tokens)]
    assert 0 < sum(live) < 5
    start = cache.begin(1, tokens, "")
    assert start < 20 or all(live[3:])
    assert seen(cache, 1, "target") == tokens[max(0, start - WINDOW + 1) : start]


def keys_of(tokens: list[int]) -> list[bytes]:
    return list(prefix_keys(tokens, SIZE, ""))


def test_another_tenant_does_not_share() -> None:
    cache, tokens = make_cache(), list(range(1, 22))
    run(cache, 0, tokens, salt="alice")
    assert cache.begin(1, tokens, "bob") == 0
    assert cache.begin(1, tokens, "alice") == 20


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    cache, tokens = make_cache(), list(range(1, 13))
    run(cache, 0, tokens)
    assert cache.begin(1, [*tokens, 50], "") == 12
    shared = pages_of(cache).table(0)[2]
    assert pages_of(cache).table(1)[2] == shared
    assert write(cache, 1, "target", [*tokens[:10], 99, 98], 10, 12)
    assert pages_of(cache).table(1)[2] != shared
    cache.commit(1, "target", 12)
    assert seen(cache, 1, "target") == [8, 9, 10, 99, 98]
    assert seen(cache, 0, "target") == tokens[7:12]
    assert cache.begin(2, [*tokens, 50], "") == 12


def test_rewritten_pages_are_no_longer_offered() -> None:
    cache, tokens = make_cache(), list(range(1, 13))
    run(cache, 0, tokens)
    assert write(cache, 0, "target", [*tokens[:10], 99, 98], 10, 12)
    assert cache.begin(1, [*tokens, 50], "") == 8


def test_a_rewritten_page_makes_way_for_another_of_its_key() -> None:
    cache, tokens = make_cache(), list(range(1, 17))
    for slot in (0, 1):  # neither knows of the other yet, so each has pages of its own
        cache.begin(slot, tokens, "")
    for slot in (0, 1):
        assert write(cache, slot, "target", tokens, 0, 12)
        cache.commit(slot, "target", 12)
        cache.publish(slot, tokens, 12)
    assert write(cache, 0, "target", [*tokens[:10], 99, 98], 10, 12)
    assert write(cache, 1, "target", tokens, 12, 16)
    cache.commit(1, "target", 16)
    cache.publish(1, tokens, 16)
    assert cache.begin(2, [*tokens[:12], 50], "") == 12
    assert seen(cache, 2, "target") == tokens[7:12]


def test_stores_have_windows_of_their_own() -> None:
    """A draft that lags catches up from wherever it is, whatever the target has given back."""
    cache, tokens = make_cache(), list(range(1, 31))
    run(cache, 0, tokens)
    assert cache.length(0, "draft") == 0
    for start in range(0, 30, 10):
        assert write(cache, 0, "draft", tokens, start, start + 10)
        cache.commit(0, "draft", start + 10)
        cache.publish(0, tokens, 30)
    assert seen(cache, 0, "draft") == tokens[-2:]
    assert n_held(cache, 0, "draft") == 1


def test_a_store_starts_over_in_the_middle_and_its_window_with_it() -> None:
    cache, tokens = make_cache(), list(range(1, 31))
    run(cache, 0, tokens)
    cache.restart(0, "draft", 17)
    for start in range(20, 28, 4):
        assert write(cache, 0, "draft", tokens, start, start + 4)
        cache.commit(0, "draft", start + 4)
        cache.publish(0, tokens, 30)
    assert seen(cache, 0, "draft") == tokens[26:28]
    assert cache.begin(1, tokens, "") == 28
    assert (cache.start(1, "draft"), cache.length(1, "draft")) == (20, 28)
    assert seen(cache, 1, "draft") == tokens[26:28]
    assert cache.begin(1, tokens[:20], "") == 16
    assert cache.length(1, "draft") == 0
    assert n_held(cache, 1, "draft") == 0


def test_recurrent_layers_beside_windows_are_refused() -> None:
    recurrent = Recurrent(n_key_heads=1, n_value_heads=1, d_key=2, d_value=2, conv_width=4)
    room = Sizes(n_slots=1, n_pages=2, page_size=SIZE, n_window_pages=2)
    with pytest.raises(ValueError, match="not supported"):
        Store([recurrent, KV(1, 2, WINDOW)], room, torch.float32, CPU)


def test_there_are_pages_for_all_slots_at_once() -> None:
    """Half of what a server makes holds every slot's window and a whole pass of each; the rest keeps prefixes."""
    chosen = Settings(parallel=3, batch_size=70, draft_max=16)
    window, size = 100, sizes.PAGE_SIZE
    n_pages = sizes.Demand([KV(1, 2, window)], torch.float32).n_window_pages(chosen) // 2
    pages = WindowPages(3, n_pages, size, window)
    for start in range(0, 1000, 37):
        for slot in range(3):
            assert pages.reserve(slot, start, start + 70 + 16, lambda source, target: None)
        for slot in range(3):
            pages.publish(slot, [bytes([slot, i]) for i in range(20)], start + 37)
    assert sizes.Demand([KV(1, 2)], torch.float32).n_window_pages(chosen) == 0


def test_layers_with_windows_take_memory_once_and_none_per_token() -> None:
    chosen = Settings(parallel=3)
    demands = [sizes.Demand([KV(1, 2, 100)] * 4, torch.float32)]
    taken = demands[0].window_bytes(chosen)
    n_pages = demands[0].n_window_pages(chosen) + 1  # one is nobody's
    assert taken == n_pages * sizes.PAGE_SIZE * 4 * 2 * 2 * 4
    each = sizes.pages_each(chosen, 1000)
    assert sizes.page_count(chosen, 1000, demands, sizes.Memory(taken, 1.0)) == 2 * 3 * each
    with pytest.raises(SettingError, match="gives 0 pages"):
        sizes.page_count(chosen, 1000, demands, sizes.Memory(taken - 1, 1.0))


class Lives(RuleBasedStateMachine):
    """Slots that begin, guess, grow, begin anew with another text and end at random beside a draft that lags.

    Every window reads the slot's own tokens, nothing leaks, and no slot holds more than its window and a pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(n_window_pages=9)
        self.tokens: dict[int, list[int]] = {}

    def go_on(self, slot: int, drafts: list[int], n_kept: int) -> None:
        """A pass of the target over the tokens that it lacks, at most six of them, and drafts."""
        tokens, n_past = self.tokens[slot], self.cache.length(slot, "target")
        end = min(n_past + 6, len(tokens))
        drafts = drafts if end == len(tokens) else []
        if not write(self.cache, slot, "target", [*tokens[:end], *drafts], n_past, end + len(drafts)):
            self.end(slot)
            return
        kept = drafts[:n_kept]
        tokens[end:end] = kept
        self.cache.commit(slot, "target", end + len(kept))
        self.cache.publish(slot, tokens, len(tokens))

    @rule(slot=st.integers(0, 2), tokens=st.lists(st.integers(1, 2), min_size=1, max_size=30))
    def begin(self, slot: int, tokens: list[int]) -> None:
        self.tokens[slot] = tokens
        self.cache.begin(slot, tokens, "")

    @rule(slot=st.integers(0, 2), drafts=st.lists(st.integers(1, 2), max_size=7), n_kept=st.integers(0, 7))
    def step(self, slot: int, drafts: list[int], n_kept: int) -> None:
        if slot in self.tokens:
            self.go_on(slot, drafts, n_kept)

    @rule(slot=st.integers(0, 2), n=st.integers(1, 9))
    def catch_up(self, slot: int, n: int) -> None:
        if slot in self.tokens:
            start = self.cache.length(slot, "draft")
            end = min(start + n, self.cache.length(slot, "target"))
            if start < end and write(self.cache, slot, "draft", self.tokens[slot], start, end):
                self.cache.commit(slot, "draft", end)

    @rule(slot=st.integers(0, 2), n_tokens=st.integers(1, 30), token=st.integers(1, 2))
    def edit(self, slot: int, n_tokens: int, token: int) -> None:
        if slot in self.tokens:
            self.begin(slot, [*self.tokens[slot][:n_tokens], token])

    @rule(slot=st.integers(0, 2))
    def end(self, slot: int) -> None:
        self.cache.drop(slot)
        self.tokens.pop(slot, None)

    @invariant()
    def windows_are_those_of_the_tokens(self) -> None:
        for slot, tokens in self.tokens.items():
            for store in ("target", "draft"):
                length, window = self.cache.length(slot, store), pages_of(self.cache, store).window
                assert length <= len(tokens)
                assert seen(self.cache, slot, store) == tokens[max(0, length - window + 1) : length]

    @invariant()
    def every_page_is_counted_once_and_none_too_many(self) -> None:
        for store in ("target", "draft"):
            pages = pages_of(self.cache, store)
            held = np.zeros(9, dtype=int)
            for slot in range(3):
                table = pages.table(slot)
                ids = table[len(table) - n_held(self.cache, slot, store) :]
                assert len(set(ids)) == len(ids)
                for page in ids:
                    held[page] += 1
            assert [page.n_holders for page in pages.pool.pages] == held.tolist()
            assert pages.pool.n_free + pages.pool.n_cached + pages.pool.n_held == 9

    @invariant()
    def the_target_holds_its_window_and_a_pass(self) -> None:
        for slot in range(3):
            assert n_held(self.cache, slot) <= -(-(WINDOW + 6 + 7) // SIZE) + 1


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_random_lives = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")(
    Lives.TestCase
)
