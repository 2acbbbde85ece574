"""Sparse changes of logits in Triton: one launch where the definition has a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.edit.entries import Entries, Penalties
from kernels.triton_launch import ROUNDED, refuses_device, tiles

TILE = 128  # entries of a program


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refuses_device(device)


def edit(logits: Tensor, entries: Entries, penalties: Penalties) -> None:
    if not logits.is_contiguous():
        raise ValueError("logits are contiguous")
    n = entries.rows.shape[0]
    if n > 0:
        each = entries.rows, entries.token_ids, entries.bias, entries.count, entries.in_window
        per_row = penalties.repeat, penalties.presence, penalties.frequency
        _change[(tiles(n, TILE),)](
            *(logits, *(x.contiguous() for x in (*each, *per_row)), n, logits.shape[1], TILE),
            num_warps=4,
            **ROUNDED,
        )


@triton.jit(do_not_specialize=["n"])
def _change(
    logits_at,
    rows_at,
    token_ids_at,
    bias_at,
    count_at,
    in_window_at,
    repeat_at,
    presence_at,
    frequency_at,
    n,
    VOCAB: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The definition's operations in its order, each rounded by itself: the same bits."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < n
    row = tl.load(rows_at + i, mask=inside, other=0)  # [SIZE] int64
    place = row * VOCAB + tl.load(token_ids_at + i, mask=inside, other=0)
    logit = tl.load(logits_at + place, mask=inside, other=0.0)
    biased = logit + tl.load(bias_at + i, mask=inside, other=0.0)
    repeat = tl.load(repeat_at + row, mask=inside, other=1.0).to(biased.dtype)
    if biased.dtype == tl.float32:
        divided = tl.div_rn(biased, repeat)
    else:
        divided = biased / repeat  # float64 has no other division
    repeated = tl.where(biased > 0, divided, biased * repeat)
    in_window = tl.load(in_window_at + i, mask=inside, other=0) != 0
    kept = tl.where(in_window, repeated, biased)
    count = tl.load(count_at + i, mask=inside, other=0)
    presence = tl.where(count > 0, tl.load(presence_at + row, mask=inside, other=0.0), 0.0)
    frequency = tl.load(frequency_at + row, mask=inside, other=0.0)
    counted = presence + frequency * count.to(tl.float32)
    tl.store(logits_at + place, (kept - counted).to(logit.dtype), mask=inside)
