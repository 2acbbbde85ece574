"""Draft heads that guess a block in one pass against their published formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.models.heads.dflash import load_dflash
from slipstream.engine.models.heads.dspark import load_dspark
from slipstream.engine.models.registry import load_network
from tests import head_checkpoints as made
from tests.oracle import head_formulas as formulas
from tests.oracle.head_formulas import Formula
from tests.oracle.head_rounds import (
    CPU,
    N_CTX,
    TOLERANCE,
    VOCAB,
    Pages,
    play_blocks,
    streams_of,
    text,
    worst,
)

pytestmark = pytest.mark.usefixtures("_selected")
Folders = Callable[[str], Path]


@pytest.mark.usefixtures("ops")
def test_dflash(folder_of: Folders, tmp_path: Path) -> None:
    tensors = made.dflash(30, n_layers=3, n_taps=3, d_head=32)
    target = load_network(folder_of("qwen3"), torch.float32, CPU, N_CTX, VOCAB)
    head = load_dflash(made.write(tmp_path, tensors, made.DFLASH_CONFIG), target, N_CTX)
    assert (head.taps, head.block_size, head.n_drafts, head.mask_id) == ((1, 3, 5), 6, 5, 381)
    assert head.n_params == sum(one.numel() for one in tensors.values())
    formula, embedding = Formula(tensors, 10000.0, 1e-5, 32), target.decoder.embedding.weight

    def expected(context: Sequence[Tensor], anchor: int) -> Tensor:
        block = embedding[torch.tensor([anchor, 381, 381, 381, 381, 381])]
        return formulas.dflash(formula, 3, context, block) @ embedding.T  # the target's head is tied

    assert play_blocks(head, target, expected, head.n_drafts) < TOLERANCE
    logits = torch.randn(2, VOCAB)
    assert torch.equal(head.correct(logits, torch.tensor([1, 2])), logits)  # rows depend on no token picked


@pytest.mark.usefixtures("ops")
def test_dspark(folder_of: Folders, tmp_path: Path) -> None:
    """Its own embedding and head, the anchor's row predicting too, the correction and the estimate."""
    tensors = made.dspark(31, n_layers=2, n_taps=2, rank=12)
    target = load_network(folder_of("llama"), torch.float32, CPU, N_CTX, VOCAB)
    head = load_dspark(made.write(tmp_path, tensors, made.DSPARK_CONFIG), target, N_CTX)
    assert (head.taps, head.block_size, head.n_drafts, head.mask_id) == ((2, 5), 5, 5, 380)
    assert head.n_params == sum(one.numel() for one in tensors.values())
    formula = Formula(tensors, 10000.0, 1e-5, 16)

    def states(context: Sequence[Tensor], anchor: int) -> Tensor:
        block = tensors["embed_tokens.weight"][torch.tensor([anchor, 380, 380, 380, 380])]
        return formulas.dflash(formula, 2, context, block)

    def expected(context: Sequence[Tensor], anchor: int) -> Tensor:
        return states(context, anchor) @ tensors["lm_head.weight"].T

    assert play_blocks(head, target, expected, head.n_drafts) < TOLERANCE

    pages, ids = Pages(head.needs), text(9)
    streams = streams_of(target, ids[:30], head.taps)
    head.inject(pages.batch(Span(2, ids[:30], 0, 0, 0)), streams, pages.store)
    logits, hidden = head.run(pages.batch(Span(2, [ids[30], *[380] * 4], 30, 4, 5)), pages.store)
    state, previous = states(streams, ids[30]), ids[30]
    table, followers = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    weight, bias = tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"]
    for row in range(5):
        token = torch.tensor([previous])
        ours = head.correct(logits[row : row + 1], token)
        theirs = state[row] @ tensors["lm_head.weight"].T + followers @ table[previous]
        assert worst(ours[0], theirs) < TOLERANCE
        estimate = (weight[0] * torch.cat((state[row], table[previous]))).sum() + bias[0]
        confidence = head.confidence(hidden[row : row + 1], token)
        assert confidence is not None
        assert worst(confidence, estimate.sigmoid()[None]) < TOLERANCE
        previous = int(ours.argmax())


def test_blocks_do_not_depend_on_the_width_of_the_pass(folder_of: Folders, tmp_path: Path) -> None:
    """Bit for bit, alone and beside other blocks."""
    flash = made.write(tmp_path, made.dflash(30, n_layers=3, n_taps=3), made.DFLASH_CONFIG)
    for dtype in (torch.float32, torch.bfloat16):
        target, ids = load_network(folder_of("llama"), dtype, CPU, N_CTX, VOCAB), text(1, 41)
        draft = load_dflash(flash, target, N_CTX)
        features = streams_of(target, ids[:40], draft.taps)
        pages, alone = Pages(draft.needs, dtype), Pages(draft.needs, dtype)
        spans = [Span(slot, ids[: 20 + 5 * slot], 0, 0, 0) for slot in range(4)]
        blocks = [Span(slot, [ids[20 + 5 * slot], *[381] * 5], 20 + 5 * slot, 5, 5) for slot in range(4)]
        joined = [torch.cat([stream[: len(span.token_ids)] for span in spans]) for stream in features]
        draft.inject(pages.batch(*spans), joined, pages.store)
        logits = draft.run(pages.batch(*blocks), pages.store)[0]
        for slot, (span, block) in enumerate(zip(spans, blocks, strict=True)):
            parts = [stream[: len(span.token_ids)] for stream in features]
            draft.inject(alone.batch(span), parts, alone.store)
            assert torch.equal(draft.run(alone.batch(block), alone.store)[0], logits[5 * slot : 5 * slot + 5])
