"""Definition of `verify`: span by span on the host."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT = True  # no sum whose order could depend on other rows


def verify(
    picks: Tensor, drafts: Tensor, span_starts: Tensor, slots: Tensor, tokens: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    picked, guessed, starts = picks.tolist(), drafts.tolist(), span_starts.tolist()
    n_accepted, next_ids = [], []
    first_draft = 0
    for i, slot in enumerate(slots.tolist()):
        own = picked[starts[i] : starts[i + 1]]
        draft = guessed[first_draft : first_draft + max(0, len(own) - 1)]
        first_draft += len(draft)
        if slot < 0 or not own:
            n_accepted.append(0)
            next_ids.append(-1)
            continue
        n = 0
        while n < len(draft) and draft[n] >= 0 and draft[n] == own[n]:
            n += 1
        kept = own[: n + 1] if own[n] >= 0 else own[:n]
        length = int(lengths[slot])
        room = max(0, tokens.shape[1] - length)
        tokens[slot, length : length + len(kept)] = torch.tensor(kept[:room], dtype=torch.int32)
        lengths[slot] = length + len(kept)
        n_accepted.append(n)
        next_ids.append(own[n])
    device = picks.device
    return (
        torch.tensor(n_accepted, dtype=torch.int32, device=device),
        torch.tensor(next_ids, dtype=torch.int64, device=device),
    )
