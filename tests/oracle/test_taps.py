"""Residual streams asked of a pass against transformers' hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.engine.batch import Span
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.registry import load_network
from tests.oracle.head_rounds import (
    CPU,
    N_CTX,
    VOCAB,
    Pages,
    streams_of,
    text,
    worst,
)

pytestmark = pytest.mark.usefixtures("_selected")
Folders = Callable[[str], Path]


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_taps_are_transformers_hidden_states(folder_of: Folders, family: str) -> None:
    """Every stream, over chunks in ragged batches of two slots, with few or no logits wanted."""
    folder = folder_of(family)
    target = load_network(folder, torch.float32, CPU, N_CTX, VOCAB)
    texts = {0: text(1), 1: text(2)}
    expected = {slot: their_streams(folder, ids) for slot, ids in texts.items()}
    every, pages = range(8), Pages(target.needs)
    n_past = {0: 0, 1: 0}
    for sizes in [(40, 9), (1, 1), (3, 40), (17, 2), (10, 19)]:
        spans = [
            Span(slot, texts[slot][n_past[slot] : n_past[slot] + size], n_past[slot], 0, size % 3)
            for slot, size in enumerate(sizes)
        ]
        taps, batch = Taps(every), pages.batch(*spans)
        with torch.inference_mode():
            target.forward(batch, pages.store, taps)
        rows = [(slot, n_past[slot] + i) for slot, size in enumerate(sizes) for i in range(size)]
        for tap, stream in zip(every, taps.of(every), strict=True):
            assert worst(stream, torch.stack([expected[slot][tap][at] for slot, at in rows])) < 2e-5
        n_past = {slot: n_past[slot] + size for slot, size in enumerate(sizes)}
    assert min(n_past.values()) > 64


def their_streams(folder: Path, ids: Sequence[int]) -> list[Tensor]:
    """Streams 0 … n_layers + 1 of transformers, [n, d_model] each; the one before the last norm by a hook."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    before: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0][0]))
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return [*(state[0] for state in states[:-1]), before[0], states[-1][0]]


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("ids", [(0,), (2, 2, 5), (6,), (7,), (0, 6, 7)])
def test_asking_for_streams_changes_no_logit(folder_of: Folders, ids: tuple[int, ...]) -> None:
    target = load_network(folder_of("qwen3"), torch.float32, CPU, N_CTX, VOCAB)
    for n_logits in (0, 1, 9, 20):
        plain, tapped, taps = Pages(target.needs), Pages(target.needs), Taps(ids)
        span = Span(0, text(3, 20), 0, 0, n_logits)
        expected = target.forward(plain.batch(span), plain.store)
        assert torch.equal(target.forward(tapped.batch(span), tapped.store, taps), expected)
        assert expected.shape == (n_logits, VOCAB)
        streams = taps.of(ids)
        assert [stream.shape for stream in streams] == [(20, 64)] * len(ids)
        with pytest.raises(KeyError):
            taps.of((4,))


def test_streams_do_not_depend_on_the_width_of_the_pass(folder_of: Folders) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        target = load_network(folder_of("qwen3"), dtype, CPU, N_CTX, VOCAB)
        ids, every = text(4, 40), range(8)
        whole = streams_of(target, ids, every)
        pages, n_past = Pages(target.needs, dtype), 0
        for size in (1, 2, 16, 5, 1, 15):
            taps, others = Taps(every), Span(1, ids[: size % 4 + 1], 0, 0, 1)
            target.forward(
                pages.batch(others, Span(0, ids[n_past : n_past + size], n_past, 0, 1)), pages.store, taps
            )
            for stream, expected in zip(taps.of(every), whole, strict=True):
                assert stream.dtype == dtype
                assert torch.equal(stream[-size:], expected[n_past : n_past + size])
            n_past += size
