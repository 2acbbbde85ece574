"""Grammar masks in Triton: logits of allowed tokens are neither read nor written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_launch import FUSED, refuses_device, tiles

TILE = 4096  # tokens of a program


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refuses_device(device)


def mask(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    if not logits.is_contiguous():
        raise ValueError("logits are contiguous")
    if allowed.numel() > 0:
        vocab = logits.shape[1]
        _forbid[allowed.shape[0], tiles(vocab, TILE)](
            logits,
            rows.contiguous(),
            allowed.contiguous(),
            vocab,
            allowed.shape[1],
            TILE,
            num_warps=8,
            **FUSED,
        )


@triton.jit
def _forbid(logits_at, rows_at, allowed_at, VOCAB: tl.constexpr, N_WORDS: tl.constexpr, SIZE: tl.constexpr):
    which = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = token < VOCAB
    word = tl.load(allowed_at + which * N_WORDS + token // 32, mask=inside, other=-1)  # [SIZE]
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    row = tl.load(rows_at + which).to(tl.int64)
    tl.store(logits_at + row * VOCAB + token, float("-inf"), mask=forbidden)
