"""Definition of `ngram` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

N_MAX = 16


EXACT = True  # no sum whose order could depend on other rows


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def ngram(
    tokens: Tensor, lengths: Tensor, slots: Tensor, n_match: Tensor, n_drafts_max: int
) -> tuple[Tensor, Tensor]:
    capacity = tokens.shape[1]
    slot = slots.clamp(min=0)  # [n_active]
    text = tokens[slot]  # [n_active, capacity]
    length = lengths[slot].clamp(max=capacity)[:, None]  # [n_active, 1]
    n = n_match[:, None]  # [n_active, 1]
    may = (slots >= 0)[:, None] & (n >= 1) & (n <= N_MAX)  # [n_active, 1]
    starts = torch.arange(capacity, device=tokens.device)[None]  # [1, capacity]
    matches = may & (starts + n < length)  # [n_active, capacity]: the last tokens are no earlier occurrence
    for j in range(N_MAX):
        wanted = text.gather(1, (length - n + j).clamp(0, capacity - 1).long())  # [n_active, 1]
        # What rolls over from the front stands behind the length, where no start is allowed.
        matches &= (text.roll(-j, 1) == wanted) | (n <= j)
    newest = torch.where(matches, starts, -1).amax(1, keepdim=True)  # [n_active, 1]
    after = newest + n  # [n_active, 1]
    n_drafts = torch.where(newest >= 0, (length - after).clamp(max=n_drafts_max), 0)  # [n_active, 1]
    places = torch.arange(n_drafts_max, device=tokens.device)[None]  # [1, n_drafts_max]
    copied = text.gather(1, (after + places).clamp(0, capacity - 1))  # [n_active, n_drafts_max]
    drafts = torch.where(places < n_drafts, copied, 0)  # [n_active, n_drafts_max]
    return drafts.to(torch.int32), n_drafts[:, 0].to(torch.int32)
