"""`ngram` on CUDA: two launches, so that many blocks can search one slot's text without atomics."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import compile_for, launch, refusal
from slipstream.kernels.cuda.source import Source

SOURCE = Source(__file__, "ngram.cu", ("find", "take"))
THREADS, CHUNK = 256, 2048  # of `find`, as in ngram.cu
MOST = 1 << 26  # tokens of a text: `END_BITS` there


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refusal(device)


def prepare(device: torch.device, _dtype: torch.dtype) -> None:
    compile_for(device, SOURCE)


def ngram(tokens: Tensor, lengths: Tensor, slots: Tensor, n_drafts_max: int) -> tuple[Tensor, Tensor]:
    _check(tokens, lengths, slots)
    capacity, n_active = tokens.shape[1], slots.shape[0]
    n_chunks = -(-capacity // CHUNK)
    longest = tokens.new_empty(n_active, n_chunks)  # [n_active, n_chunks]
    drafts, n_matched = tokens.new_empty(n_active, n_drafts_max), tokens.new_empty(n_active)
    text = (tokens, lengths, slots, capacity)
    launch(SOURCE, "find", (n_chunks, n_active, 1), THREADS, *text, longest)
    launch(SOURCE, "take", (n_active, 1, 1), 32, *text, longest, n_chunks, n_drafts_max, drafts, n_matched)
    return drafts, n_matched


def _check(tokens: Tensor, lengths: Tensor, slots: Tensor) -> None:
    """Raises ValueError on tensors the kernels would read as other bits, and on longer texts than they can count."""
    meant = ((tokens, torch.int32), (lengths, torch.int32), (slots, torch.int64))
    if any(one.dtype != dtype or not one.is_contiguous() for one, dtype in meant):
        raise ValueError("tokens and lengths are contiguous int32, slots int64")
    if tokens.shape[1] > MOST:
        raise ValueError(f"texts of {tokens.shape[1]} tokens; the kernels count to {MOST}")
