"""`verify` in CUDA C++: one launch, a warp per span."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import compile_for, launch, refusal
from slipstream.kernels.cuda.source import Source

SPANS = Source(__file__, "verify.cu", ("verify",))


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refusal(device)


def prepare(device: torch.device, _dtype: torch.dtype) -> None:
    compile_for(device, SPANS)


def verify(
    picks: Tensor, drafts: Tensor, span_starts: Tensor, slots: Tensor, tokens: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    _check((picks, drafts, slots), (span_starts, tokens, lengths))
    n_spans, capacity = slots.shape[0], tokens.shape[1]
    if span_starts.shape[0] != n_spans + 1:
        raise ValueError(f"{n_spans} slots want {n_spans + 1} span_starts, not {span_starts.shape[0]}")
    n_accepted, next_ids = span_starts.new_empty(n_spans), picks.new_empty(n_spans)
    launch(
        SPANS,
        "verify",
        (n_spans, 1, 1),
        32,
        *(picks, drafts, span_starts, slots, tokens, capacity, lengths, n_accepted, next_ids),
    )
    return n_accepted, next_ids


def _check(longs: tuple[Tensor, ...], ints: tuple[Tensor, ...]) -> None:
    """Raises ValueError on tensors the kernel would read as other bits."""
    meant = [(one, torch.int64) for one in longs] + [(one, torch.int32) for one in ints]
    if any(one.dtype != dtype or not one.is_contiguous() for one, dtype in meant):
        raise ValueError(
            "picks, drafts and slots are contiguous int64; span_starts, tokens and lengths int32"
        )
