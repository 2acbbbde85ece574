"""Definition of `mask` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT = True  # no sum whose order could depend on other rows


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def mask(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    places = torch.arange(32, device=logits.device, dtype=torch.int32)  # [32]
    bits = (allowed[:, :, None] >> places) & 1  # [n_masked, n_words, 32]
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0  # [n_masked, vocab]
    logits[rows] = logits[rows].masked_fill(forbidden, float("-inf"))
