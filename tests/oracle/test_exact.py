"""A row's logits are the same bits whatever runs beside it: rows of its span, other slots, a prefix from the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.core.forward import STORE
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network
from slipstream.kernels import OPS, select
from tests.checkpoints import tiny_checkpoint
from tests.oracle.lossless import DEMO, HYBRID, folders_of

WIDTHS, BATCHES = (1, 2, 3, 5, 8, 16), (1, 4, 32)
PAGE, N_TEXT, N_JUDGED = 16, 40, 16
CPU = torch.device("cpu")
SIZES = Sizes(n_slots=32, n_pages=200, page_size=PAGE, n_parked=64, n_window_pages=200)


def network(kind: str, dtype: torch.dtype, scratch: Path) -> Network:
    folders = {"full": DEMO.target, "hybrid": HYBRID.target}
    if kind in (
        *("qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "gemma4", "mimo_v2_flash"),
        "step3p7",
    ):
        folders[kind] = tiny_checkpoint(kind, scratch / kind)
    elif kind == "window":
        folders[kind] = folders_of("window", scratch).target
    select(CPU, torch.float32, exact=OPS)
    select(CPU, dtype, exact=OPS)
    return load_network(folders[kind], dtype, CPU, 256, None)


class Sequences:
    """One text in slot 0, others in the slots beside it, all as far as their first tokens."""

    def __init__(self, target: Network, n_slots: int, seed: int, store: Store | None = None) -> None:
        """store: of `SIZES`; None: one is made."""
        random = np.random.default_rng(seed)
        self.target, self.random = target, random
        if store is None:
            store = Store(target.needs, SIZES, target.dtype, CPU)
        self.cache = Cache({STORE: store}, 32, 200, PAGE)
        self.text = np.random.default_rng(7).integers(0, target.vocab_size, N_TEXT + N_JUDGED).tolist()
        self.lengths = [0] * n_slots
        self.run([N_TEXT, *random.integers(1, 60, n_slots - 1).tolist()])

    def run(self, widths: list[int]) -> Tensor:
        """Go on by so many tokens per slot; the logits of slot 0's, [widths[0], vocab]."""
        spans = []
        for slot, (n, n_past) in enumerate(zip(widths, self.lengths, strict=True)):
            assert self.cache.reserve(slot, STORE, n_past, n_past + n)
            tokens = self.text[n_past : n_past + n] if slot == 0 else self.random.integers(0, 90, n).tolist()
            spans.append(Span(slot, tokens, n_past, 0, n))
        self.random.shuffle(spans)  # type: ignore[arg-type]
        logits = self.target.forward(self.cache.batch(STORE, spans), self.cache.stores[STORE])
        first = sum(len(one.token_ids) for one in spans[: [one.slot for one in spans].index(0)])
        for one in spans:
            self.lengths[one.slot] += len(one.token_ids)
            self.cache.commit(one.slot, STORE, self.lengths[one.slot])
        return logits[first : first + widths[0]].clone()

    def judged(self, width: int) -> Iterator[Tensor]:
        """Logits of the text's last tokens, so many at a time, beside random numbers of others'."""
        while self.lengths[0] < N_TEXT + N_JUDGED:
            n = min(width, N_TEXT + N_JUDGED - self.lengths[0])
            yield self.run([n, *self.random.integers(1, 6, len(self.lengths) - 1).tolist()])


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        *("full", "window", "hybrid", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
        *("mimo_v2_flash", "step3p7"),
    ],
)
@torch.inference_mode()
def test_logits_depend_on_nothing_beside_them(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target = network(kind, dtype, tmp_path)
    meant = torch.cat(list(Sequences(target, 1, 0).judged(1)))  # [N_JUDGED, vocab]
    for seed, (width, n_slots) in enumerate(itertools.product(WIDTHS, BATCHES)):
        found = torch.cat(list(Sequences(target, n_slots, seed).judged(width)))
        assert torch.equal(found, meant), f"{width} rows, {n_slots} slots"


@torch.inference_mode()
def test_logits_behind_an_adopted_prefix(tmp_path: Path) -> None:
    target = network("full", torch.bfloat16, tmp_path)
    alone, beside = Sequences(target, 1, 0), Sequences(target, 2, 1)
    meant = torch.cat(list(alone.judged(1)))
    beside.cache.publish(0, beside.text[:N_TEXT], N_TEXT)
    assert beside.cache.begin(5, beside.text, "") == N_TEXT // PAGE * PAGE
    start = N_TEXT // PAGE * PAGE
    assert beside.cache.reserve(5, STORE, start, N_TEXT + N_JUDGED)
    span = Span(5, beside.text[start:], start, 0, N_JUDGED)
    logits = target.forward(beside.cache.batch(STORE, [span]), beside.cache.stores[STORE])
    assert torch.equal(logits, meant)


@torch.inference_mode()
def test_it_would_be_seen(tmp_path: Path) -> None:
    """With torch's own products, whose sums depend on the number of rows, the same comparison fails."""
    select(CPU, torch.float32, {"matmul": "reference"})
    target = load_network(DEMO.target, torch.float32, CPU, 256, None)
    meant = torch.cat(list(Sequences(target, 1, 0).judged(1)))
    found = torch.cat(list(Sequences(target, 4, 1).judged(5)))
    select(CPU, torch.float32)
    assert not torch.equal(found, meant)
