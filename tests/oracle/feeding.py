"""Feeding a text to a network in any cut, and comparing its logits with those of an oracle."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.captured import Forward
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network
from tests.checkpoints import N_PROMPT, theirs

CPU = torch.device("cpu")
N_CTX, PAGE, N_PAGES, N_SLOTS = 256, 16, 80, 5
WINDOW_PAGE = 8
SIZES = Sizes(n_slots=N_SLOTS, n_pages=N_PAGES, page_size=PAGE, n_parked=160, n_window_pages=N_PAGES)
NEAR = 1e-4  # of logits that two programs compute in float32


class Runner:
    """A network with a cache; feeds texts in any cut."""

    def __init__(self, network: Network, store: Store | None = None) -> None:
        """store: of `SIZES`; None: one is made."""
        self.network = network
        self.forward: Forward = network.forward
        if store is None:
            store = Store(network.needs, SIZES, network.dtype, CPU)
        self.cache = Cache({"target": store}, N_SLOTS, N_PAGES, PAGE)

    def feed(self, *spans: Span, n_kept: Sequence[int] = (), taps: Taps | None = None) -> Tensor:
        """Logits of one pass, [n_logits, vocab]. Of each span its certain tokens are kept, and n_kept[i] drafts.

        taps: streams to keep of its rows.
        """
        for span in spans:
            end = span.n_past + len(span.token_ids)
            assert self.cache.reserve(span.slot, "target", span.n_past, end, span.n_drafts)
        with torch.inference_mode():
            logits = self.forward(self.cache.batch("target", spans), self.cache.stores["target"], taps)
        for span, n_drafts in zip(spans, n_kept or [0] * len(spans), strict=True):
            end = span.n_past + len(span.token_ids)
            self.cache.commit(span.slot, "target", end - span.n_drafts + n_drafts)
        return logits

    def feed_chunks(self, slot: int, token_ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Logits of all rows of one text fed in chunks, [n_tokens, vocab]."""
        starts = itertools.accumulate(sizes, initial=0)
        return torch.cat(
            [
                self.feed(rows(slot, token_ids, start, size))
                for start, size in zip(starts, sizes, strict=False)
            ]
        )


def rows(slot: int, token_ids: Sequence[int], start: int, size: int) -> Span:
    """The span of `size` tokens of a text from `start`, with all logits."""
    return Span(slot, list(token_ids[start : start + size]), start, 0, size)


def loaded(folder: Path, dtype: torch.dtype = torch.float32, n_vocab: int | None = 384) -> Network:
    return load_network(folder, dtype, CPU, N_CTX, n_vocab)


def difference(ours: Tensor, expected: Tensor) -> float:
    assert ours.dtype == torch.float32
    return float((ours - expected).abs().max())


class Windowed(Runner):
    """A runner whose sequences are published, so that windows move on; pages that nobody holds are NaN."""

    def __init__(self, network: Network, n_window_pages: int = N_PAGES) -> None:
        self.network, self.forward = network, network.forward
        sizes = Sizes(
            n_slots=N_SLOTS, n_pages=2 * N_PAGES, page_size=WINDOW_PAGE, n_window_pages=n_window_pages
        )
        self.store = Store(network.needs, sizes, network.dtype, CPU)
        self.cache = Cache({"target": self.store}, N_SLOTS, 2 * N_PAGES, WINDOW_PAGE)
        self.tokens: dict[int, list[int]] = {}
        self.poison()

    def feed(self, *spans: Span, n_kept: Sequence[int] = (), taps: Taps | None = None) -> Tensor:
        logits = super().feed(*spans, n_kept=n_kept, taps=taps)
        for span in spans:
            tokens = self.tokens.setdefault(span.slot, [])
            tokens[span.n_past :] = span.token_ids
            del tokens[self.cache.length(span.slot, "target") :]
            self.cache.publish(span.slot, tokens, len(tokens))
        self.poison()
        return logits

    def poison(self) -> None:
        windows = self.store.windows
        assert windows is not None
        idle = [i for i, page in enumerate(windows.pool.pages) if page.n_holders == 0]
        for need, layer in zip(self.network.needs, self.store.layers, strict=True):
            if need.window is not None:
                layer.keys[idle] = layer.values[idle] = torch.nan


def compare_cuts(runner: Runner, prompt: Tensor, expected: Tensor) -> None:
    """A text whole, in chunks and token by token. prompt: [N_PROMPT]; expected: [N_PROMPT, vocab]."""
    assert expected.std() > 0.3, "logits must be large enough to show a difference"
    ids = prompt.tolist()
    for slot, sizes in enumerate(([N_PROMPT], [33, 1, 15, 2, 49], [1] * N_PROMPT)):
        assert difference(runner.feed_chunks(slot, ids, sizes), expected) < NEAR


def compare_ragged(runner: Runner, prompt: Tensor, expected: Tensor, seed: int) -> None:
    """Five slots go over the same text, guessing some tokens right and the rest wrong, beside chunks."""
    ids, rng = prompt.tolist(), random.Random(seed)
    n_past = [0] * N_SLOTS
    n_checked = n_rejected = 0
    while min(n_past) < N_PROMPT:
        spans, kept, wanted = [], [], []
        for slot in rng.sample(range(N_SLOTS), N_SLOTS):
            left = N_PROMPT - n_past[slot]
            if left == 0 or rng.random() < 0.2:
                continue
            start, n_certain = n_past[slot], min(rng.choice([1, 1, 1, 2, 17]), left)
            n_right = min(rng.choice([0, 1, 3, 7]), left - n_certain)
            wrong = [rng.randrange(384) for _ in range(rng.choice([0, 1, 4, 20]))]
            n_past[slot] += n_certain + n_right
            tokens = [*ids[start : n_past[slot]], *wrong]
            spans.append(Span(slot, tokens, start, n_right + len(wrong), len(tokens)))
            kept.append(n_right)
            wanted += [*range(start, n_past[slot]), *[-1] * len(wrong)]
            n_rejected += len(wrong)
        if spans:
            logits, places = runner.feed(*spans, n_kept=kept), torch.tensor(wanted)
            assert difference(logits[places >= 0], expected[places[places >= 0]]) < NEAR
            n_checked += int((places >= 0).sum())
    assert n_checked == N_SLOTS * N_PROMPT
    assert n_rejected > 50


def compare_greedy(make: Callable[[Network], Runner], folder: Path, prompt: Tensor, n_new: int = 72) -> None:
    """Greedy text of a checkpoint against transformers', token by token. prompt: [n_tokens]."""
    expected = theirs(folder).generate(prompt[None], max_new_tokens=n_new, do_sample=False, eos_token_id=None)
    ids, runner, n_past = prompt.tolist(), make(loaded(folder)), 0
    for _ in range(n_new):
        logits = runner.feed(Span(0, ids[n_past:], n_past, 0, 1))
        n_past = len(ids)
        ids.append(int(logits.argmax()))
    assert ids == expected[0].tolist()
