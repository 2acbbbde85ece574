"""Definition of `edit` in plain torch; also the fast version, since few rows have entries and they are few."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.edit.entries import Entries, Penalties

EXACT = True  # no sum whose order could depend on other rows


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def edit(logits: Tensor, entries: Entries, penalties: Penalties) -> None:
    rows = entries.rows
    biased = logits[rows, entries.token_ids] + entries.bias
    repeat = penalties.repeat[rows]
    repeated = torch.where(biased > 0, biased / repeat, biased * repeat)
    kept = torch.where(entries.in_window, repeated, biased)
    counted = penalties.presence[rows] * (entries.count > 0) + penalties.frequency[rows] * entries.count
    logits[rows, entries.token_ids] = (kept - counted).to(logits.dtype)
