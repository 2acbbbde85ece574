"""Definition of `ngram` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

N_MAX = 16


EXACT = True  # no sum whose order could depend on other rows


def ngram(tokens: Tensor, lengths: Tensor, slots: Tensor, n_drafts_max: int) -> tuple[Tensor, Tensor]:
    capacity = tokens.shape[1]
    slot = slots.clamp(min=0)  # [n_active]
    text = tokens[slot]  # [n_active, capacity]
    length = torch.where(slots >= 0, lengths[slot].clamp(max=capacity), 0)[:, None]  # [n_active, 1]
    ends = torch.arange(capacity, device=tokens.device)[None]  # [1, capacity]: of earlier runs
    same = ends < length - 1  # [n_active, capacity]
    run = torch.zeros_like(text)  # [n_active, capacity]: tokens that agree, backwards from each end
    for j in range(N_MAX):
        wanted = text.gather(1, (length - 1 - j).clamp(min=0).long())  # [n_active, 1]
        same &= (text.roll(j, 1) == wanted) & (ends >= j)
        run += same
    # The longest, and of those the newest: [n_active, 1] each.
    longest = run.amax(1, keepdim=True)
    end = torch.where(run == longest, ends, -1).amax(1, keepdim=True)
    found = longest > 0
    period = torch.where(found, length - 1 - end, 1)  # [n_active, 1]: tokens from there to the text's end
    steps = torch.arange(n_drafts_max, device=tokens.device)[None] % period  # [n_active, n_drafts_max]
    copied = text.gather(1, torch.where(found, end + 1 + steps, 0))
    return torch.where(found, copied, 0).to(torch.int32), longest[:, 0].to(torch.int32)
