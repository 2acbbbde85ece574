"""Passes that are recorded on the CPU and replayed, against the passes themselves: the same bits, for every family.

A replay is wrong where something depends on a value that it does not read anew. So shapes recur with other tokens,
places, lengths and slots, some drafts are kept and some are not, and all that the passes keep is compared at the end.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.batch import Batch, Span
from slipstream.engine.core.clock import Clock
from slipstream.engine.core.engine import Engine
from slipstream.engine.frames import ExactFrames, Frame
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.captured import Capturing, cpu_capture
from slipstream.engine.models.network import Network
from slipstream.engine.speculate.decide.cost import Costs
from slipstream.kernels import select
from slipstream.kernels.program import Sealed
from slipstream.kernels.tape import Replay, Work
from tests.checkpoints import tiny_checkpoint
from tests.gguf_files import gguf_of
from tests.oracle.feeding import CPU, N_SLOTS, Runner, loaded
from tests.oracle.lab import DEMO, Bench, Lab, play
from tests.oracle.lossless import HEADS, demo_cases, folders_of, narrowed
from tests.oracle.replays import same_drafts
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.sampled(keep=4)
DTYPES = torch.float32, torch.bfloat16
N_PASSES, N_PAGES, N_DRAFTS = 60, 16, 6


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    for dtype in DTYPES:
        select(CPU, dtype)


class Recorded(Runner):
    """A runner whose passes are recorded and replayed."""

    def __init__(self, network: Network, taps: Sequence[int] = ()) -> None:
        super().__init__(network)
        stream = torch.zeros(1, network.config.d_model, dtype=network.dtype)
        self.replays: list[Replay] = []
        capture = cpu_capture()

        def kept(work: Work) -> Work:
            replay = capture(work)
            assert isinstance(replay, Replay)
            self.replays.append(replay)
            return replay

        capturing = Capturing(kept, None, N_PAGES, N_DRAFTS, stream)
        self.forward = capturing.forward(network.forward, self.cache.stores["target"], taps)


def _passes(seed: int, n_vocab: int) -> list[tuple[list[Span], list[int]]]:
    """Spans and how many of their drafts are kept: of three slots, a few tokens each, so that shapes recur."""
    rng, lengths, passes = random.Random(seed), [0] * N_SLOTS, []
    for _ in range(N_PASSES):
        spans, kept = [], []
        for slot in rng.sample(range(N_SLOTS), rng.choice([1, 1, 2])):
            if lengths[slot] > 150:
                continue
            n_certain, n_drafts = rng.choice([(1, 0), (1, 2), (3, 0), (2, N_DRAFTS)])
            tokens = [rng.randrange(n_vocab) for _ in range(n_certain + n_drafts)]
            n_logits = rng.choice([1, len(tokens)])
            spans.append(Span(slot, tokens, lengths[slot], n_drafts, n_logits))
            kept.append(rng.randint(0, n_drafts))
            lengths[slot] += n_certain + kept[-1]
        passes.append((spans, kept))
    return [one for one in passes if one[0]]


def _kept(runner: Runner) -> list[Tensor]:
    """All that passes have left: rows by page, but those of the page that nobody owns, and states."""
    store = runner.cache.stores["target"]
    rows = [one[:-1] for one in (*store.held.page_tensors("full"), *store.held.page_tensors("window"))]
    return [*rows, *(one for slot in range(N_SLOTS) for one in store.snapshot(slot))]


def _compare(
    network: Network, caplog: pytest.LogCaptureFixture, whole: Collection[str] = ("take_rows",)
) -> None:
    """whole: operators of which replays may call the implementation."""
    taps = (0, 1, network.config.n_layers, network.config.n_layers + 1)
    plain, recorded = Runner(network), Recorded(network, taps)
    for spans, n_kept in _passes(0, network.vocab_size):
        found = []
        for runner in (plain, recorded):
            streams = Taps(taps)
            found.append([runner.feed(*spans, n_kept=n_kept, taps=streams), *streams.of(taps)])
        for meant, one in zip(*found, strict=True):
            assert torch.equal(meant, one)
    assert len(recorded.cache.stores["target"].frames._by_shape) == len(recorded.replays) > 8
    first, *others = [len(one.steps) for one in recorded.replays]
    assert first <= max(others)  # it does not do again what is done at first use
    for meant, one in zip(_kept(plain), _kept(recorded), strict=True):
        assert torch.equal(meant, one)
    assert "not recorded" not in caplog.text
    assert {one.function.__name__ for one in _operators(recorded.replays)} <= {*whole}


def _operators(replays: Sequence[Replay]) -> list[Any]:
    """Operators of ours that replays call whole."""
    steps = [step for one in replays for step in one.steps]
    return [one for one in steps if inspect.isfunction(getattr(one, "function", None))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_replay_gives_the_bits_of_the_pass_itself(
    family: str, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _compare(loaded(tiny_checkpoint(family, tmp_path), dtype), caplog)


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "Q8_0"), ("qwen3", "Q4_0"), ("qwen3_moe", "Q8_0")])
def test_a_replay_gives_the_bits_of_a_pass_over_blocks(
    family: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Products with codes, and rows of an embedding in codes, whose ids are looked at."""
    file = gguf_of(tiny_checkpoint(family, tmp_path)).as_type(kind).write(tmp_path / "model.gguf")
    _compare(loaded(file, torch.bfloat16), caplog)


@pytest.mark.parametrize("products", ["cpu", "tiled"])
def test_products_of_torch_are_called_whole(
    products: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on CPUs for which none are compiled."""
    select(CPU, torch.bfloat16, {"matmul": products})
    try:
        _compare(loaded(tiny_checkpoint("qwen3", tmp_path), torch.bfloat16), caplog, {"take_rows", "linear"})
    finally:
        select(CPU, torch.bfloat16)


@pytest.mark.parametrize("name", ["draft-model", *HEADS])
def test_drafts_and_text_are_the_same(name: str) -> None:
    n_accepted, same = same_drafts(Lab(DEMO, torch.bfloat16), (name,), exact=True)
    assert same
    assert n_accepted > 0


@pytest.mark.parametrize(
    ("kind", "name"), [("window", "draft-model"), ("hybrid", "draft-model"), ("hybrid", "draft-mtp")]
)
def test_drafts_and_text_are_the_same_with_other_caches(kind: str, name: str, tmp_path: Path) -> None:
    n_accepted, same = same_drafts(Lab(folders_of(kind, tmp_path), torch.bfloat16), (name,), exact=True)
    assert same
    assert n_accepted > 0


def _n_frames(engine: Engine, store: str = "target") -> int:
    frames = engine._cache.stores[store].frames
    assert isinstance(frames, ExactFrames)
    return len(frames._by_shape)


def test_what_a_recording_takes_is_not_taken_for_what_a_pass_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    lab, counts = Lab(DEMO, torch.bfloat16), Counter[str]()
    for owner in (Costs, Clock):

        def passed(self: Any, *args: Any, name: str = owner.__name__, does: Any = owner.passed) -> None:
            counts[name] += 1
            does(self, *args)

        monkeypatch.setattr(owner, "passed", passed)
    bench = Bench(("suffix",), n_slots=2, recorded=True)
    played = play(lab, bench, narrowed(demo_cases(lab, "greedy", 6), bench.types, 0))
    assert not played.failed
    assert played.engine is not None
    assert counts["Clock"] - counts["Costs"] == _n_frames(played.engine) > 2


def test_a_warm_engine_has_measured_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time there is, every width that is measured has been recorded, and replayed since."""
    measured: list[int] = []
    monkeypatch.setattr(Costs, "passed", lambda self, n_rows, seconds: measured.append(n_rows))
    engine = Lab(DEMO, torch.bfloat16).engine(Bench(n_slots=2, recorded=True))
    engine.warm_up(2, enough_s=0.0)
    frames = engine._cache.stores["target"].frames
    assert isinstance(frames, ExactFrames)
    filled = [*frames._by_shape.values()]
    assert {1, 2, 4, 8} <= {one.n_rows for one in filled} <= set(measured)
    assert not any(one.is_new for one in filled)


def test_a_warm_engine_has_recorded_the_passes_of_one_slot() -> None:
    engine = Lab(DEMO, torch.bfloat16).engine(Bench(n_slots=1, recorded=True))
    frames = engine._cache.stores["target"].frames
    assert frames.unmade(range(1, 11)) == [*range(1, 11)]
    engine.warm_up(9, enough_s=60.0)
    assert frames.unmade(range(1, 12)) == [11]


def test_a_value_frozen_in_a_recording_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lengths that a replay does not read anew change its logits."""
    network = loaded(tiny_checkpoint("qwen3", tmp_path))
    fill = Frame.fill
    monkeypatch.setattr(Frame, "fill", lambda frame, batch: fill(frame, _without_past(batch)))
    with pytest.raises(AssertionError):
        _compare(network, caplog)


def _without_past(batch: Batch) -> Batch:
    return replace(batch, n_past=torch.zeros_like(batch.n_past))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_pass_of_a_plain_family_is_one_program(family: str, tmp_path: Path) -> None:
    """Behind the lookup of embeddings and before the copy of logits."""
    recorded = Recorded(loaded(tiny_checkpoint(family, tmp_path), torch.bfloat16))
    for i in range(3):
        recorded.feed(Span(0, [5, 6, 7], 3 * i, 0, 3))
    (replay,) = recorded.replays
    assert [type(one) for one in replay.steps].count(Sealed) == 1
    assert len(replay.steps) == 3
