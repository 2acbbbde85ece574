"""Park and fold, and snapshots, on a layer whose state is a number that remembers every token it took in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.kv import KV
from slipstream.engine.cache.need import LayerState, Sizes
from slipstream.engine.cache.parking import Parking
from slipstream.engine.cache.snapshots import Snapshots
from slipstream.engine.cache.store import Store
from slipstream.kernels.gated_delta.spans import RecurrentRows

SIZE = 4
CPU = torch.device("cpu")
PRIME = 2_147_483_647


def after(state: int, token: int) -> int:
    """What a state becomes; order matters."""
    return (state * 31 + token + 1) % PRIME


@dataclass(frozen=True)
class Remembering:
    """The need of the toy layer. Its snapshots are due at every page: a slot's state costs as much as many tokens."""

    is_recurrent = True
    window = source = None

    def token_bytes(self, dtype: torch.dtype) -> int:
        return 2

    def slot_bytes(self, dtype: torch.dtype) -> int:
        return 8

    def parked_bytes(self, dtype: torch.dtype) -> int:
        return 8

    def window_bytes(self, dtype: torch.dtype) -> int:
        return 0

    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Memory:
        return Memory(torch.zeros(sizes.n_slots, dtype=torch.int64), torch.full((sizes.n_parked,), -7))


@dataclass
class Memory(LayerState):
    """The toy layer's state."""

    state: Tensor  # [n_slots] int64
    parked: Tensor  # [n_parked] int64

    def settle(self, rows: RecurrentRows) -> None:
        self.run(rows, [])

    def of_slot(self, slot: int) -> list[Tensor]:
        return [self.state[slot : slot + 1]]

    def run(self, rows: RecurrentRows, tokens: list[int]) -> list[int]:
        """A pass, as `kernels.gated_delta.spans` defines it; what each row's state is."""
        seen: list[int] = []
        starts, past = rows.span_starts.tolist(), rows.history_starts.tolist()
        for i, slot in enumerate(rows.slot_ids.tolist()):
            state = int(self.state[slot])
            history = [int(self.parked[row]) for row in rows.history_rows.tolist()[past[i] : past[i + 1]]]
            updates = [*history, *tokens[starts[i] : starts[i + 1]]]
            for n, token in enumerate(updates):
                state = after(state, token)
                if n + 1 == int(rows.n_settled[i]):
                    self.state[slot] = state
                if n >= len(history):
                    seen.append(state)
                    place = int(rows.park_rows[starts[i] + n - len(history)])
                    if place >= 0:
                        self.parked[place] = token
        return seen


def make_cache(n_slots: int = 3, n_pages: int = 30, n_parked: int = 8, room: int = 1000) -> Cache:
    sizes = Sizes(n_slots=n_slots, n_pages=n_pages, page_size=SIZE, n_parked=n_parked)
    needs: list[Any] = [KV(1, 2), Remembering()]
    stores = {name: Store(needs, sizes, torch.float32, CPU) for name in ("target", "draft")}
    return Cache(stores, n_slots, n_pages, SIZE, snapshots=Snapshots(room))


def feed(cache: Cache, store: str, *spans: Span) -> list[int]:
    """One pass over spans whose rows have been reserved; the state after each row."""
    batch = cache.batch(store, spans)
    assert batch.recurrent is not None
    seen: list[int] = cache.stores[store].layers[1].run(batch.recurrent, batch.token_ids.tolist())
    return seen


def truth(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = after(state, token)
    return state


def run(cache: Cache, slot: int, tokens: list[int], chunk: int = 100, n_prompt: int | None = None) -> int:
    """Take a slot's target over all but the last token; return how much came from the prefix cache."""
    n_past = start = cache.begin(slot, tokens, "")
    while n_past < len(tokens) - 1:
        border = cache.next_border("target", n_past, n_prompt or len(tokens))
        end = min(len(tokens) - 1, n_past + chunk, border if border is not None else 10**9)
        assert cache.reserve(slot, "target", n_past, end)
        feed(cache, "target", Span(slot, tokens[n_past:end], n_past, 0, 0))
        cache.commit(slot, "target", end)
        cache.publish(slot, tokens, n_prompt or len(tokens))
        n_past = end
    return start


def state_of(cache: Cache, slot: int, store: str = "target") -> int:
    """The state as the next pass would find it: at the committed length."""
    tokens: list[int] = []
    length = cache.length(slot, store)
    assert cache.reserve(slot, store, length, length + 1, 1)
    (seen,) = feed(cache, store, Span(slot, [0], length, 1, 1))  # a draft, which changes nothing
    cache.commit(slot, store, length)
    assert not tokens
    return seen


def test_a_rejected_draft_was_never_done() -> None:
    for n_kept in range(6):
        cache, tokens = make_cache(), [5, 6, 7]
        run(cache, 0, tokens)
        drafts = [1, 2, 3, 4, 5]
        assert cache.reserve(0, "target", 2, 8, 5)
        feed(cache, "target", Span(0, [7, *drafts], 2, 5, 6))
        cache.commit(0, "target", 3 + n_kept)
        assert state_of(cache, 0) == after(truth([*tokens, *drafts[:n_kept]]), 0)


def test_a_draft_network_goes_on_from_rows_that_are_not_committed() -> None:
    cache, tokens = make_cache(), [5, 6, 7]
    assert cache.reserve(0, "draft", 0, 7, 4)
    feed(cache, "draft", Span(0, tokens, 0, 0, 1))
    cache.commit(0, "draft", 3)
    for i, guess in enumerate([1, 2, 3, 4]):
        (seen,) = feed(cache, "draft", Span(0, [guess], 3 + i, 1, 1))
        assert seen == truth([*tokens, *[1, 2, 3, 4][: i + 1]])
    cache.commit(0, "draft", 5)  # two of them were right
    assert cache.reserve(0, "draft", 5, 7, 1)
    assert feed(cache, "draft", Span(0, [9], 5, 0, 1)) == [truth([5, 6, 7, 1, 2, 9])]


def test_rows_that_are_folded_serve_the_same_slot_again_at_once() -> None:
    """A pool of five rows carries drafts of five, all accepted, for ever; a second slot finds no room meanwhile."""
    cache, tokens = make_cache(n_parked=5), [5, 6]
    run(cache, 0, tokens)
    run(cache, 1, tokens)
    n_past = 1
    for _ in range(4):
        assert cache.reserve(0, "target", n_past, n_past + 6, 5)
        assert not cache.reserve(1, "target", 1, 3, 1)
        assert cache.reserve(1, "target", 1, 2, 0)
        drafts = [1, 2, 3, 4, 5]
        feed(cache, "target", Span(0, [tokens[n_past], *drafts], n_past, 5, 6))
        tokens += [*drafts, 8]
        n_past += 6
        cache.commit(0, "target", n_past)
        assert truth(tokens[:n_past]) == _folded(cache, 0)


def _folded(cache: Cache, slot: int) -> int:
    """The state at the committed length, by hand."""
    parking, memory = cache.stores["target"].parking, cache.stores["target"].layers[1]
    assert parking is not None
    state = int(memory.state[slot])
    for row in parking._lanes[slot].parked:
        state = after(state, int(memory.parked[row]))
    return state


def test_rows_go_back_to_the_pool_when_a_slot_ends() -> None:
    parking = Parking(2, 6)
    assert parking.reserve(0, 4)
    assert len(parking._free) == 2
    assert not parking.reserve(1, 3)
    assert len(parking._free) == 2
    parking.reset(0, 0)
    assert len(parking._free) == 6


def test_a_prefix_is_resumed_from_the_last_snapshot() -> None:
    cache, tokens = make_cache(), list(range(18))
    assert run(cache, 0, tokens) == 0
    assert run(cache, 1, [*tokens[:14], 99, 98, 97]) == 12
    assert state_of(cache, 1) == after(truth([*tokens[:14], 99, 98]), 0)
    assert run(cache, 2, list(range(1, 19))) == 0


def test_without_room_for_snapshots_nothing_is_resumed() -> None:
    cache, tokens = make_cache(room=0), list(range(18))
    run(cache, 0, tokens)
    assert cache.next_border("target", 3, 18) is None
    assert run(cache, 1, tokens) == 0
    assert state_of(cache, 1) == after(truth(tokens[:17]), 0)


def test_the_oldest_snapshot_makes_room() -> None:
    cache = make_cache(room=3 * 8)
    run(cache, 0, list(range(18)))  # borders 4, 8, 12, 16
    assert len(cache.snapshots) == 3
    assert cache.snapshots.n_bytes == 24
    assert run(cache, 1, [*range(7), 50, 51]) == 0  # the first one is gone
    assert run(cache, 2, [*range(17), 60]) == 16


def test_of_snapshots_those_used_last_stay() -> None:
    states = [torch.zeros(1, dtype=torch.int64)]
    kept = Snapshots(2 * states[0].nbytes)
    first, second, third = (("target", bytes([i])) for i in range(3))
    kept.put(first, states)
    kept.put(second, states)
    assert kept.find(first) is not None
    kept.put(third, states)
    assert [key in kept for key in (first, second, third)] == [True, False, True]


def test_a_draft_over_a_border_leaves_a_snapshot_there() -> None:
    cache, tokens = make_cache(), [1, 2, 3]
    run(cache, 0, tokens)
    drafts = [4, 5, 6, 7, 8, 9]
    assert cache.reserve(0, "target", 2, 9, 6)
    feed(cache, "target", Span(0, [3, *drafts], 2, 6, 7))
    tokens += [*drafts, 10]
    cache.commit(0, "target", 9)
    cache.publish(0, tokens, 3)
    assert _folded(cache, 0) == truth(tokens[:9])
    assert run(cache, 1, [*tokens[:8], 70]) == 8
    assert state_of(cache, 1) == after(truth(tokens[:8]), 0)


def test_after_a_pass_that_broke_off_nothing_of_it_is_left() -> None:
    cache, tokens = make_cache(), list(range(11))
    run(cache, 0, tokens)
    assert cache.reserve(0, "target", 10, 14, 3)
    feed(cache, "target", Span(0, [10, 1, 2, 3], 10, 3, 4))
    assert cache.recover(0) == 8
    parking = cache.stores["target"].parking
    assert parking is not None
    assert len(parking._free) == 8
    assert state_of(cache, 0) == after(truth(tokens[:8]), 0)


def test_other_stores_keep_their_rows_while_the_target_recovers() -> None:
    """What they hold is of the same tokens."""
    sizes = Sizes(n_slots=1, n_pages=8, page_size=SIZE, n_parked=4)
    needs: list[Any] = [KV(1, 2), Remembering()]
    stores = {
        "target": Store(needs, sizes, torch.float32, CPU),
        "head": Store(needs[:1], sizes, torch.float32, CPU),
    }
    cache = Cache(stores, 1, 8, SIZE, Snapshots(1000))
    run(cache, 0, list(range(11)))
    cache.commit(0, "head", 10)
    assert cache.recover(0) == 8
    assert cache.length(0, "head") == 10


def test_a_recurrent_store_starts_over_in_the_middle_and_is_resumed_from_there() -> None:
    cache, tokens = make_cache(), list(range(18))
    run(cache, 0, tokens)
    cache.restart(0, "draft", 6)
    assert (cache.start(0, "draft"), cache.length(0, "draft")) == (8, 8)
    for start in (8, 12):
        assert cache.reserve(0, "draft", start, start + 4)
        feed(cache, "draft", Span(0, tokens[start : start + 4], start, 0, 0))
        cache.commit(0, "draft", start + 4)
        cache.publish(0, tokens, 18)
    assert state_of(cache, 0, "draft") == after(truth(tokens[8:16]), 0)
    assert ("draft", cache._entries[0].keys[1]) not in cache.snapshots, "of no token there is none"
    assert cache.begin(1, tokens, "") == 16
    assert (cache.start(1, "draft"), cache.length(1, "draft")) == (8, 16)
    assert state_of(cache, 1, "draft") == after(truth(tokens[8:16]), 0)
    assert cache.begin(1, tokens[:16], "") == 12
    assert (cache.start(1, "draft"), cache.length(1, "draft")) == (8, 12)
    assert state_of(cache, 1, "draft") == after(truth(tokens[8:12]), 0)
    assert cache.begin(1, tokens[:12], "") == 8
    assert (cache.start(1, "draft"), cache.length(1, "draft")) == (0, 0)
    assert state_of(cache, 1, "draft") == after(0, 0)


class Lives(RuleBasedStateMachine):
    """Slots that begin, draft, keep some, start over, break off and end at random, on too few rows and snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(n_slots=3, n_pages=24, n_parked=7, room=5 * 8)
        self.tokens: dict[int, list[int]] = {}

    @rule(slot=st.integers(0, 2), tokens=st.lists(st.integers(1, 2), min_size=1, max_size=20))
    def begin(self, slot: int, tokens: list[int]) -> None:
        self.tokens[slot] = tokens
        run(self.cache, slot, tokens, chunk=5)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), drafts=st.lists(st.integers(1, 2), max_size=6), fails=st.booleans())
    def step(self, data: st.DataObject, drafts: list[int], fails: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens, n_past = self.tokens[slot], self.cache.length(slot, "target")
        if len(tokens) > 30:
            return self.end(slot)
        certain = tokens[n_past:]  # more than one where it starts over
        if not self.cache.reserve(slot, "target", n_past, len(tokens) + len(drafts), len(drafts)):
            drafts = []
            assert self.cache.reserve(slot, "target", n_past, len(tokens), 0)
        seen = feed(self.cache, "target", Span(slot, [*certain, *drafts], n_past, len(drafts), 1))
        assert seen[-1] == truth([*tokens, *drafts])
        if fails:
            self.cache.recover(slot)
            return None
        n_kept = data.draw(st.integers(0, len(drafts)))
        self.cache.commit(slot, "target", len(tokens) + n_kept)
        tokens += [*drafts[:n_kept], 2]
        self.cache.publish(slot, tokens, 1)
        return None

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def start_over(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        assert self.cache.begin(slot, self.tokens[slot], "") <= len(self.tokens[slot]) - 1

    @rule(slot=st.integers(0, 2))
    def end(self, slot: int) -> None:
        self.cache.drop(slot)
        self.tokens.pop(slot, None)

    @invariant()
    def states_are_those_of_the_tokens(self) -> None:
        for slot, tokens in self.tokens.items():
            assert _folded(self.cache, slot) == truth(tokens[: self.cache.length(slot, "target")])

    @invariant()
    def every_row_is_somewhere_once(self) -> None:
        parking = self.cache.stores["target"].parking
        assert parking is not None
        rows = [*parking._free, *(row for lane in parking._lanes for row in (*lane.parked, *lane.spare))]
        assert sorted(rows) == list(range(7))


Lives.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
test_random_lives = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")(
    Lives.TestCase
)
