"""`mask` on CPU: words of which all tokens are allowed, or none, are not looked at bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.compiled import float_pointer, int_pointer, kernel, long_pointer, shifted

LEAST = np.float32(-np.inf)


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def mask(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError("logits are contiguous float32")
    shape = (*allowed.shape, logits.shape[1])
    _mask(logits.data_ptr(), rows.contiguous().data_ptr(), allowed.contiguous().data_ptr(), shape)


@kernel
def _mask(logits: int, rows: int, allowed: int, shape: Any) -> None:
    """shape: (n_masked, n_words, vocab)."""
    n_masked, n_words, vocab = shape
    for i in range(n_masked):
        row = shifted(float_pointer(logits), long_pointer(rows)[i] * vocab)
        words = shifted(int_pointer(allowed), i * n_words)
        for w in range((vocab + 31) // 32):
            word, first = words[w], 32 * w
            if word == -1:
                continue
            for bit in range(min(32, vocab - first)):
                if not (word >> bit) & 1:
                    row[first + bit] = LEAST
