"""Pages, prefix sharing and store lengths."""

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
from slipstream.engine.cache.pages import PagePool, prefix_keys
from slipstream.engine.cache.store import Store

SIZE = 4


def make_cache(n_slots: int = 3, n_pages: int = 8) -> Cache:
    def store() -> Store:
        return Store(
            [KV(1, 2)],
            Sizes(n_slots=3, n_pages=n_pages, page_size=SIZE),
            torch.float32,
            torch.device("cpu"),
        )

    return Cache({"target": store(), "draft": store()}, n_slots, n_pages, SIZE)


def run(cache: Cache, slot: int, tokens: list[int], salt: str = "", *, draft: bool = True) -> int:
    """Take a slot through a whole sequence; return how much of it came from the prefix cache."""
    n_past = cache.begin(slot, tokens, salt)
    assert cache.reserve(slot, "target", n_past, len(tokens))
    cache.commit(slot, "target", len(tokens))
    if draft:
        assert cache.reserve(slot, "draft", cache.length(slot, "draft"), len(tokens))
        cache.commit(slot, "draft", len(tokens))
    cache.publish(slot, tokens, len(tokens))
    return n_past


def test_a_prefix_is_shared_up_to_the_page_before_the_last_token() -> None:
    cache = make_cache()
    tokens = list(range(12))
    assert run(cache, 0, tokens) == 0
    assert cache.begin(1, tokens, "") == 8  # never the last token: its logits are still wanted
    assert cache.begin(2, [*tokens, 99], "") == 12
    assert list(cache.table(1)) == list(cache.table(0))[:2]


def test_another_tenant_does_not_share() -> None:
    cache = make_cache()
    run(cache, 0, list(range(9)), salt="alice")
    assert cache.begin(1, list(range(9)), "bob") == 0
    assert cache.begin(1, list(range(9)), "alice") == 8


def test_a_key_depends_on_every_token_before_it() -> None:
    first = list(prefix_keys([1, 2, 3, 4, 5, 6, 7, 8], 4, ""))
    second = list(prefix_keys([9, 2, 3, 4, 5, 6, 7, 8], 4, ""))
    assert first[1] != second[1]
    assert list(prefix_keys([1, 2, 3, 4, 5, 6, 7, 8], 4, "", known=first[:1])) == first[1:]


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    cache = make_cache()
    tokens = list(range(9))
    run(cache, 0, tokens, draft=False)
    keys = cache.stores["target"].layers[0].keys
    keys[cache.table(0)[0]] = 7.0
    assert cache.begin(1, tokens, "") == 8
    assert cache.length(1, "draft") == 0  # the pages were made without the draft network
    shared = cache.table(0)[0]
    assert cache.reserve(1, "draft", 0, 8)
    assert cache.table(1)[0] != shared
    assert torch.equal(keys[cache.table(1)[0]], keys[shared])  # the target's rows came along
    assert cache.length(1, "target") == 8


def test_the_page_complete_for_more_stores_stays_published() -> None:
    cache = make_cache()
    tokens = list(range(9))
    run(cache, 0, tokens, draft=False)
    run(cache, 1, tokens, draft=True)
    assert cache.begin(2, tokens, "") == 8
    assert cache.length(2, "draft") == 8
    assert list(cache.table(2)) == list(cache.table(1))[:2]


def test_rows_start_on_a_page_border_and_batches_with_them() -> None:
    cache = make_cache()
    tokens = list(range(11))
    run(cache, 0, tokens, draft=False)
    cache.restart(0, "draft", 3)
    assert (cache.start(0, "draft"), cache.length(0, "draft")) == (4, 4)
    assert cache.reserve(0, "draft", 4, 11)
    batch = cache.batch("draft", [Span(0, tokens[4:9], 4, 0, 1)])
    assert batch.positions.tolist() == [4, 5, 6, 7, 8], "rotations are those of the whole text"
    assert batch.n_past.tolist() == [0]
    assert batch.page_table.tolist() == [list(cache.table(0))[1:]]
    assert batch.row_pages.tolist() == [cache.table(0)[i // SIZE] for i in range(4, 9)]
    assert batch.row_offsets.tolist() == [0, 1, 2, 3, 0]
    cache.commit(0, "draft", 9)
    batch = cache.batch("draft", [Span(0, tokens[9:], 9, 0, 1)])
    assert batch.n_past.tolist() == [5]
    batch.move_back(torch.tensor([2]), SIZE)
    assert batch.positions.tolist() == [7, 8]
    assert batch.n_past.tolist() == [3]
    assert batch.row_pages.tolist() == [cache.table(0)[1], cache.table(0)[2]]
    assert batch.row_offsets.tolist() == [3, 0]


def test_a_prefix_is_adopted_as_far_as_the_target_has_it_and_the_last_run_of_others() -> None:
    cache = make_cache(n_pages=20)
    tokens = list(range(21))
    run(cache, 0, tokens, draft=False)
    cache.restart(0, "draft", 8)
    assert cache.reserve(0, "draft", 8, 16)
    cache.commit(0, "draft", 16)
    cache.publish(0, tokens, len(tokens))
    assert cache.begin(1, tokens, "") == 20
    assert (cache.start(1, "draft"), cache.length(1, "draft")) == (8, 16)
    assert cache.begin(1, [*tokens[:14], 99], "") == 12
    assert (cache.start(1, "draft"), cache.length(1, "draft")) == (8, 12)
    assert cache.begin(1, [*tokens[:8], 99], "") == 8
    assert cache.length(1, "draft") == 0


def test_rewritten_pages_are_no_longer_offered() -> None:
    cache = make_cache()
    tokens = list(range(9))
    run(cache, 0, tokens)
    assert cache.reserve(0, "target", 2, 9)  # other tokens will be written here
    assert cache.begin(1, tokens, "") == 0


def test_reserve_changes_nothing_when_there_is_no_room() -> None:
    cache = make_cache(n_pages=2)
    assert not cache.reserve(0, "target", 0, 9)
    assert list(cache.table(0)) == []
    assert cache.pool.n_free == 2


def test_cached_pages_are_taken_back_least_recently_used_first() -> None:
    pool = PagePool(2)
    pages = [pool.take(), pool.take()]
    for page, key in zip(pages, (b"a", b"b"), strict=True):
        pool.publish(page, key, {"target"})
        pool.release(page)
    pool.hold(pages[0])
    pool.release(pages[0])  # used again, so b is older now
    assert pool.take() == pages[1]
    assert pool.find(b"b") is None
    assert pool.find(b"a") == pages[0]


class Lives(RuleBasedStateMachine):
    """Slots that begin, draft, begin anew with another text, and end at random.

    Pages must never leak, mix or change under a sharer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(n_slots=3, n_pages=10)
        self.tokens: dict[int, list[int]] = {}

    def write(self, slot: int, start: int, end: int) -> bool:
        """Write each position's (token) into the target's rows, as a pass would."""
        if not self.cache.reserve(slot, "target", start, end):
            return False
        keys = self.cache.stores["target"].layers[0].keys
        for position in range(start, end):
            keys[self.cache.table(slot)[position // SIZE], 0, position % SIZE] = self.tokens[slot][position]
        self.cache.commit(slot, "target", end)
        self.cache.publish(slot, self.tokens[slot], len(self.tokens[slot]))
        return True

    @rule(slot=st.integers(0, 2), tokens=st.lists(st.integers(1, 2), min_size=1, max_size=14))
    def begin(self, slot: int, tokens: list[int]) -> None:
        self.tokens[slot] = tokens
        n_past = self.cache.begin(slot, tokens, "")
        if not self.write(slot, n_past, len(tokens)):
            self.end(slot)

    @rule(slot=st.integers(0, 2), n_tokens=st.integers(0, 14), token=st.integers(1, 2))
    def edit(self, slot: int, n_tokens: int, token: int) -> None:
        if slot in self.tokens:
            self.begin(slot, [*self.tokens[slot][:n_tokens], token])

    @rule(slot=st.integers(0, 2), n_tokens=st.integers(0, 14), n=st.integers(1, 9), starts=st.booleans())
    def draft(self, slot: int, n_tokens: int, n: int, starts: bool) -> None:
        """The draft network is fed some of what the target has, from anywhere."""
        if slot not in self.tokens:
            return
        tokens, n_past = self.tokens[slot], self.cache.length(slot, "target")
        if starts and n_tokens < n_past:
            self.cache.restart(slot, "draft", n_tokens)
        start = self.cache.length(slot, "draft")
        end = min(start + n, n_past)
        if start < end and self.cache.reserve(slot, "draft", start, end):
            batch = self.cache.batch("draft", [Span(slot, tokens[start:end], start, 0, 0)])
            keys = self.cache.stores["draft"].layers[0].keys
            keys[batch.row_pages, 0, batch.row_offsets, 0] = batch.token_ids.float()
            self.cache.commit(slot, "draft", end)
            self.cache.publish(slot, tokens, len(tokens))

    @rule(slot=st.integers(0, 2))
    def end(self, slot: int) -> None:
        self.cache.drop(slot)
        self.tokens.pop(slot, None)

    @invariant()
    def rows_are_those_of_the_tokens(self) -> None:
        for slot, tokens in self.tokens.items():
            table = self.cache.table(slot)
            for name, store in self.cache.stores.items():
                keys, start, end = (
                    store.layers[0].keys,
                    self.cache.start(slot, name),
                    self.cache.length(slot, name),
                )
                assert start % SIZE == 0
                assert start == 0 or name != "target"
                rows = [float(keys[table[i // SIZE], 0, i % SIZE, 0]) for i in range(start, end)]
                assert rows == tokens[start:end]

    @invariant()
    def every_page_is_counted_once(self) -> None:
        pool = self.cache.pool
        held = np.zeros(10, dtype=int)
        for slot in range(3):
            for page in self.cache.table(slot):
                held[page] += 1
        assert [page.n_holders for page in pool.pages] == held.tolist()
        assert pool.n_held == int((held > 0).sum())
        assert pool.n_free + pool.n_cached + pool.n_held == 10


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_random_lives = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")(
    Lives.TestCase
)
