"""`ngram` on CUDA: two launches, so that many blocks can search one slot's text without atomics."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import compile_for, launch, refusal
from slipstream.kernels.cuda.source import Source
from slipstream.kernels.torch_op import torch_op

SOURCE = Source(__file__, "ngram.cu", ("find", "take"))
THREADS, CHUNK = 256, 2048  # of `find`, as in ngram.cu


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refusal(device)


def prepare(device: torch.device) -> None:
    compile_for(device, SOURCE)


def shapes(
    tokens: Tensor, lengths: Tensor, slots: Tensor, n_match: Tensor, n_drafts_max: int
) -> tuple[Tensor, Tensor]:
    """What `ngram` returns, unfilled: drafts [n_active, n_drafts_max] and their numbers [n_active]."""
    n_active = slots.shape[0]
    return tokens.new_empty(n_active, n_drafts_max), tokens.new_empty(n_active)


@torch_op(shapes)
def ngram(
    tokens: Tensor, lengths: Tensor, slots: Tensor, n_match: Tensor, n_drafts_max: int
) -> tuple[Tensor, Tensor]:
    _check(tokens, lengths, slots, n_match)
    capacity, n_active = tokens.shape[1], slots.shape[0]
    n_chunks = -(-capacity // CHUNK)
    newest = tokens.new_empty(n_active, n_chunks)  # [n_active, n_chunks]
    drafts, n_drafts = shapes(tokens, lengths, slots, n_match, n_drafts_max)
    text = (tokens, lengths, slots, n_match, capacity)
    launch(SOURCE, "find", (n_chunks, n_active, 1), THREADS, *text, newest)
    launch(SOURCE, "take", (n_active, 1, 1), 32, *text, newest, n_chunks, n_drafts_max, drafts, n_drafts)
    return drafts, n_drafts


def _check(tokens: Tensor, lengths: Tensor, slots: Tensor, n_match: Tensor) -> None:
    """Raises ValueError on tensors the kernels would read as other bits."""
    meant = ((tokens, torch.int32), (lengths, torch.int32), (slots, torch.int64), (n_match, torch.int32))
    if any(one.dtype != dtype or not one.is_contiguous() for one, dtype in meant):
        raise ValueError("tokens, lengths and n_match are contiguous int32, slots int64")
