"""Comparing replayed passes with the passes they were captured from; on a GPU these are CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.api import Speculate
from slipstream.engine.batch import Span
from slipstream.engine.core import forward
from slipstream.engine.frames import Frames, FrameSize, frame_sizes
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.captured import Capturing
from tests.oracle.lab import Bench, Lab, Played, play
from tests.oracle.lossless import demo_cases

N_SLOTS, N_DRAFTS, PAGE, BATCH = 4, 6, 16, 100


@torch.inference_mode()
def compare_all_sizes(lab: Lab) -> list[str]:
    """The captured sizes whose logits, streams or cached rows differ from those of the pass itself."""
    engine = lab.engine(Bench(n_slots=N_SLOTS, page_size=PAGE, n_pages=17, n_window_pages=17))
    cache, target = engine._cache, lab.target
    store = cache.stores[forward.STORE]
    random = np.random.default_rng(0)
    for slot in range(N_SLOTS):  # contexts to look back on
        assert cache.reserve(slot, forward.STORE, 0, 64)
        text = random.integers(0, target.vocab_size, 20 + 9 * slot).tolist()
        target.forward(cache.batch(forward.STORE, [Span(slot, text, 0, 0, 0)]), store)
    sizes = frame_sizes(N_SLOTS, N_DRAFTS, BATCH)
    n_layers = target.config.n_layers
    tapped = (0, 2, n_layers, n_layers + 1)
    stream = torch.zeros(1, target.config.d_model, dtype=target.dtype, device=target.device)
    captured = Capturing(lab.capture, sizes, 8, N_DRAFTS, stream).forward(target.decoder, store, tapped)
    filled = store.frames
    pages = [*store.held.page_tensors("full"), *store.held.page_tensors("window")]  # [n_pages + 1, …] each
    wrong = []
    for size in [size for size in sizes for _ in range(2)]:
        spans = _spans(random, size, target.vocab_size)
        meant_taps, taps = Taps(tapped), Taps(tapped)
        before = [one.clone() for one in pages]
        store.frames = Frames([])
        meant = target.forward(cache.batch(forward.STORE, spans), store, meant_taps)
        meant_pages = [one.clone() for one in pages]
        for one, old in zip(pages, before, strict=True):
            one.copy_(old)
        store.frames = filled
        batch = cache.batch(forward.STORE, spans)
        assert batch.frame is not None
        with store.held.together():
            logits = captured(batch, store, taps)
        n_own = sum(len(one.token_ids) for one in spans)
        pairs = [(logits, meant)]
        pairs += zip((one[:n_own] for one in taps.of(tapped)), meant_taps.of(tapped), strict=True)
        pairs += ((one[:-1], other[:-1]) for one, other in zip(pages, meant_pages, strict=True))
        if not all(torch.equal(one, other) for one, other in pairs):
            wrong.append(f"{size}: {[len(one.token_ids) for one in spans]}")
    return wrong


def _spans(random: np.random.Generator, size: FrameSize, vocab: int) -> list[Span]:
    """Spans that together have at most so many rows and logits, of random slots, some rows without logits."""
    slots = random.permutation(N_SLOTS)[: int(random.integers(1, size.n_spans + 1))].tolist()
    lengths = [1] * len(slots)
    for _ in range(int(random.integers(0, size.n_rows - len(slots) + 1))):
        lengths[int(random.integers(len(slots)))] += 1
    lengths = [min(n, 64 - 20 - 9 * slot) for n, slot in zip(lengths, slots, strict=True)]
    most = size.n_logits // len(slots)
    return [
        Span(
            slot,
            random.integers(0, vocab, n).tolist(),
            20 + 9 * slot,
            n - 1,
            int(random.integers(1, min(n, most) + 1)),
        )
        for slot, n in zip(slots, lengths, strict=True)
    ]


def same_drafts(
    lab: Lab, types: tuple[str, ...], n_cases: int = 6, *, exact: bool = False
) -> tuple[int, bool]:
    """(drafts accepted, whether text, counts and all pages are those of passes that are not captured).

    exact: passes are recorded in exact frames, as on the CPU.

    With penalties the host looks at every guess; without them guesses are looped on the device.
    """
    bench = Bench(types, n_slots=3, adaptive=False, draft_max=8, n_pages=60, n_window_pages=36)
    n_accepted, same = 0, True
    for name in ("warm", "all"):
        cases = [
            replace(
                one,
                max_tokens=24,
                speculate=Speculate(n_max=(8, 2, 5)[i % 3]),
                sampling=replace(one.sampling, ignore_eos=name == "all"),  # which edits rows
            )
            for i, one in enumerate(demo_cases(lab, name, n_cases))
        ]
        way = replace(bench, recorded=True) if exact else replace(bench, captured=True)
        plain, replayed = (play(lab, one, cases) for one in (bench, way))
        n_accepted += sum(one for _, one in _drafts(plain).values())
        same = same and replayed.tokens == plain.tokens and _drafts(replayed) == _drafts(plain)
        same = same and all(map(torch.equal, _pages(plain), _pages(replayed)))
    return n_accepted, same


def _drafts(played: Played) -> dict[str, tuple[int, int]]:
    assert played.stats is not None
    return {name: (one.n_drafted, one.n_accepted) for name, one in played.stats.drafters.items()}


def _pages(played: Played) -> list[Tensor]:
    """All rows of all stores, whether anybody reads them or not; without the pages that are nobody's."""
    assert played.engine is not None
    stores = played.engine._cache.stores.values()
    return [
        one[:-1]
        for store in stores
        for one in (*store.held.page_tensors("full"), *store.held.page_tensors("window"))
    ]
