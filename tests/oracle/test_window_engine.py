"""Engines over networks with sliding windows: the same text whatever is drafted, cut, resumed or preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from slipstream.engine.cache.window import WindowPages
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
    """A target with windows of 25, two pages of 16 or three, and itself with some noise as a draft model."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    changes = {"max_position_embeddings": 2048, "num_hidden_layers": 3, "sliding_window": 25}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    tiny_checkpoint("gemma3", target, changes={**changes, "layer_types": kinds})
    noised_copy(target, draft, 0.02)
    return Lab(Folders(target, draft), torch.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("n", range(len(SAMPLINGS)), ids=list(SAMPLINGS))
def test_text_is_that_of_plain_decoding(lab: Lab, n: int) -> None:
    cases = demo_cases(lab, list(SAMPLINGS)[n], 4)
    expected = play(lab, Bench(n_window_pages=500), cases)
    for i, chain in enumerate(CHAINS):
        for bench in list(benches(chain))[(i + n) % 3 :: 3]:
            found = disturbed(lab, replace(bench, n_window_pages=30), cases, expected, seed=i)
            assert found.n_wrong == 0, bench
            assert found.n_accepted > 0 or chain == ("garbage",)


@pytest.fixture(scope="module")
def crowd(lab: Lab) -> tuple[list[Case], dict[int, list[int]]]:
    """Many requests, and the text of each."""
    cases = demo_cases(lab, "warm", 8)
    return cases, play(lab, Bench(n_window_pages=500), cases)


@pytest.mark.sampled(keep=2)
def test_prefixes_are_resumed_and_slots_preempted(
    lab: Lab, crowd: tuple[list[Case], dict[int, list[int]]]
) -> None:
    """The disturbances are real, and window pages as short as they may be."""
    cases, expected = crowd
    for n_window_pages in (9, 24, 128):
        bench = Bench(("scripted",), n_slots=4, n_pages=200, n_window_pages=n_window_pages, adaptive=False)
        asked = narrowed(cases, bench.types, 0)
        played = play(lab, bench, asked, known=expected.tokens, trouble=Trouble(0.5))
        assert played.tokens == expected.tokens
        assert played.stats is not None
        assert (played.stats.n_preempted > 0) == (n_window_pages == 9)
        assert played.n_cached > 0 or n_window_pages == 9  # few pages may all be taken before anybody returns


def _plant_early_release(patch: pytest.MonkeyPatch) -> None:
    """Pages are given back a few tokens too early."""
    honest = WindowPages.publish

    def publish(self: WindowPages, slot: int, keys: Sequence[bytes], length: int) -> None:
        honest(self, slot, keys, length)
        held = self._held[slot]
        if len(held.ids) > 1:
            self.pool.release(held.ids.pop(0))
            held.first += 1

    patch.setattr(WindowPages, "publish", publish)


def _plant_short_prefix(patch: pytest.MonkeyPatch) -> None:
    """A prefix is adopted with its last page alone."""

    def adopt(self: WindowPages, slot: int, keys: Sequence[bytes]) -> int:
        self.drop(slot)
        live = [i for i, key in enumerate(keys) if self.pool.find(key) is not None]
        if not live:
            return 0
        page_id = self.pool.find(keys[live[-1]])
        assert page_id is not None
        self.pool.hold(page_id)
        self._held[slot].first, self._held[slot].ids = live[-1], [page_id]
        return live[-1] + 1

    patch.setattr(WindowPages, "adopt", adopt)


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("plant", [_plant_early_release, _plant_short_prefix])
def test_planted_faults_turn_it_red(
    lab: Lab,
    crowd: tuple[list[Case], dict[int, list[int]]],
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases, expected = crowd
    plant(monkeypatch)
    bench = Bench(("scripted",), n_slots=4, n_pages=400, n_window_pages=60, adaptive=False)
    asked = narrowed(cases, bench.types, 0)

    def is_noticed(seed: int) -> bool:
        try:
            played = play(lab, bench, asked, seed=seed, known=expected.tokens, trouble=Trouble(0.5))
        except AssertionError:
            return True  # even before a token was wrong
        return any(played.tokens[i] != expected.tokens[i] for i in played.tokens)

    assert any(is_noticed(seed) for seed in range(1, 7))
