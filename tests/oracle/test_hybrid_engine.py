"""Engines over networks with recurrent state: the same text whatever is drafted, cut, resumed or broken off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Speculate
from slipstream.engine.batch import Span
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.parking import Parking
from slipstream.engine.layers.gated_delta import GatedDelta
from slipstream.kernels.gated_delta.spans import RecurrentRows
from tests.checkpoints import noised_copy, tiny_checkpoint
from tests.oracle.lab import Bench, Case, Folders, Lab, Trouble, play
from tests.oracle.lossless import SAMPLINGS, benches, demo_cases, disturbed, narrowed

CHAINS: Sequence[tuple[str, ...]] = (
    ("draft-model",),
    ("scripted",),
    ("prediction", "suffix", "draft-model"),
    ("garbage",),
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A hybrid target, and itself with some noise as a hybrid draft model."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    tiny_checkpoint("qwen3_5", target, changes={"max_position_embeddings": 2048})
    noised_copy(target, draft, 0.02)
    return Lab(Folders(target, draft), torch.float32)


def cases_of(lab: Lab, name: str, n_cases: int = 6) -> list[Case]:
    return demo_cases(lab, name, n_cases)


@pytest.mark.sampled
@pytest.mark.parametrize("n", range(len(SAMPLINGS)), ids=list(SAMPLINGS))
def test_text_is_that_of_plain_decoding(lab: Lab, n: int, *, is_whole: bool) -> None:
    cases = cases_of(lab, list(SAMPLINGS)[n], 6 if is_whole else 3)
    expected = play(lab, Bench(snapshot_bytes=0), cases)
    for i, chain in enumerate(CHAINS):
        for bench in list(benches(chain))[(i + n) % 3 :: 3 if is_whole else 4]:
            # Networks without training agree only where both have seen the whole text.
            found = disturbed(lab, replace(bench, draft_context=0), cases, expected, seed=i)
            assert found.n_wrong == 0, bench
            assert found.n_accepted > 0 or chain == ("garbage",)


@pytest.mark.sampled
def test_prefixes_are_resumed_and_slots_preempted(lab: Lab, *, is_whole: bool) -> None:
    """The disturbances are real; with less room for snapshots and parked rows than would be wanted."""
    cases = cases_of(lab, "warm", 12 if is_whole else 8)
    expected = play(lab, Bench(snapshot_bytes=0), cases)
    for room in (0, 200_000, 2**26) if is_whole else (0, 200_000):
        bench = Bench(("scripted",), n_slots=4, n_pages=30, n_parked=5, snapshot_bytes=room, adaptive=False)
        asked = narrowed(cases, bench.types, 0)
        played = play(lab, bench, asked, seed=4, known=expected.tokens, trouble=Trouble(0.5))
        assert played.tokens == expected.tokens
        assert played.stats is not None
        assert played.stats.n_preempted > 0
        assert (played.n_cached > 0) == (room > 0)


@pytest.mark.sampled
@pytest.mark.parametrize("n_had", [1, 13, 64])
def test_a_reply_goes_on_behind_tokens_of_another_engine(lab: Lab, n_had: int) -> None:
    """States are made of tokens as those of a prompt, also over page borders and with slots preempted."""
    cases = [replace(one, max_tokens=80) for one in cases_of(lab, "warm", 6)]
    expected = play(lab, Bench(snapshot_bytes=0), cases)
    had = [tuple(expected.tokens[i][:n_had]) for i in range(len(cases))]
    moved = [
        replace(one, asks=replace(one.asks, emitted=tokens)) for one, tokens in zip(cases, had, strict=True)
    ]
    for n_pages in (30, 200):
        bench = Bench(("scripted",), n_slots=4, n_pages=n_pages, adaptive=False)
        played = play(lab, bench, narrowed(moved, bench.types, 0), known=expected.tokens)
        assert {i: [*had[i], *played.tokens[i]] for i in range(len(cases))} == expected.tokens


@pytest.mark.sampled(keep=3)
def test_long_drafts_beside_prompts_in_chunks(lab: Lab) -> None:
    long = Speculate(n_max=64)
    cases = [replace(one, speculate=long, max_tokens=150) for one in cases_of(lab, "greedy", 6)]
    expected = play(lab, Bench(), cases)
    bench = Bench(
        ("scripted",), n_slots=4, n_parked=256, draft_max=64, batch_size=96, adaptive=False, n_pages=400
    )
    played = play(lab, bench, cases, known=expected.tokens)
    assert played.tokens == expected.tokens
    assert max(len(one.speculation.histogram) for one in played.done.values()) == 65
    assert any(sum(one.speculation.histogram[17:]) for one in played.done.values())


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every 41st call of a gated-delta layer raises, when its state has moved. The list counts calls and failures."""
    counts = [0, 0]
    honest = GatedDelta.__call__

    def call(self: GatedDelta, *args: object) -> Tensor:
        result = honest(self, *args)  # type: ignore[arg-type]
        counts[0] += 1
        if counts[0] % 41 == 0:
            counts[1] += 1
            raise RuntimeError("planted")
        return result

    monkeypatch.setattr(GatedDelta, "__call__", call)
    return counts


@pytest.mark.sampled(keep=3)
@pytest.mark.filterwarnings("error")
def test_a_pass_that_breaks_off_leaves_no_trace(lab: Lab, breaking: list[int]) -> None:
    cases = cases_of(lab, "warm")
    counts, breaking[0] = breaking[0], -(10**9)
    expected = play(lab, Bench(), cases)
    breaking[0] = counts
    bench = Bench(("scripted",), n_slots=3, adaptive=False)
    played = play(lab, bench, narrowed(cases, bench.types, 0), known=expected.tokens)
    assert breaking[1] > 5
    assert played.tokens == expected.tokens


def _plant_commit_one_more(patch: pytest.MonkeyPatch) -> None:
    """The state takes the first draft in before anybody has verified it."""
    honest = Parking.rows

    def rows(
        self: Parking, spans: Sequence[Span], committed: Sequence[int], device: torch.device
    ) -> RecurrentRows:
        made = honest(self, spans, committed, device)
        more = torch.tensor([min(span.n_drafts, 1) for span in spans], dtype=torch.int32)
        return replace(made, n_settled=made.n_settled + more)

    patch.setattr(Parking, "rows", rows)


def _plant_forgotten_reset(patch: pytest.MonkeyPatch) -> None:
    """A new sequence starts from the state that the last one left in its slot."""

    def resume(self: Cache, slot: int, name: str) -> None:
        self._entries[slot].rows[name] = range(0)
        parking = self.stores[name].parking
        assert parking is not None
        parking.reset(slot, 0)

    patch.setattr(Cache, "_resume", resume)
    patch.setattr("slipstream.engine.cache.store.Store.reset", lambda *args: None)


def _plant_unparked_history(patch: pytest.MonkeyPatch) -> None:
    """Kept drafts are not folded."""
    honest = Parking.rows

    def rows(
        self: Parking, spans: Sequence[Span], committed: Sequence[int], device: torch.device
    ) -> RecurrentRows:
        made = honest(self, spans, committed, device)
        kept = made.history_starts.diff()
        return replace(
            made,
            history_starts=torch.zeros_like(made.history_starts),
            history_rows=made.history_rows[:0],
            n_settled=made.n_settled - kept,
        )

    patch.setattr(Parking, "rows", rows)


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("plant", [_plant_commit_one_more, _plant_forgotten_reset, _plant_unparked_history])
def test_a_planted_fault_is_seen(
    lab: Lab, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [replace(one, speculate=Speculate(n_max=8)) for one in cases_of(lab, "warm", 8)]
    expected = play(lab, Bench(snapshot_bytes=0), cases)
    bench = Bench(("scripted",), n_slots=2, adaptive=False, snapshot_bytes=0)
    assert disturbed(lab, bench, cases, expected, seed=0).n_wrong == 0
    plant(monkeypatch)
    assert disturbed(lab, bench, cases, expected, seed=0).n_wrong > 0


@pytest.mark.sampled(keep=3)
def test_a_draft_model_says_the_same_after_a_prefix_hit(lab: Lab) -> None:
    """Its own snapshots and rows serve it: the second request's drafts are accepted as often as the first one's."""
    case = replace(cases_of(lab, "greedy", 1)[0], max_tokens=60, speculate=Speculate(n_max=6))
    bench = Bench(("draft-model",), n_slots=1, adaptive=False, page_size=16)
    played = play(lab, bench, [case, case, case])
    counts = [one.speculation.histogram for one in played.done.values()]
    assert played.n_cached > 0
    assert counts[0] == counts[1] == counts[2]
