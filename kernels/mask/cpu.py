"""`mask` on CPU: bits are unpacked by numpy, row by row, without copies of the logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def mask(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    for row, words in zip(rows.tolist(), allowed.numpy(), strict=True):
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=logits.shape[1])  # [vocab]
        logits[row].masked_fill_(torch.from_numpy(bits == 0), float("-inf"))
