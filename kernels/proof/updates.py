"""A sequence fed to a recurrence, pass by pass: what the proofs of recurrent operators have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.kernels.gated_delta.spans import IntArray, RecurrentRows

N_SLOTS, N_PARKED = 3, 16
SLOT = 1  # whose sequence is looked at; the others are company
_BEFORE, _BEHIND = 5, 2  # rows of the company in each pass


def fed(
    lengths: Sequence[int],
    run: Callable[[Tensor, RecurrentRows], Tensor],
    settle: Callable[[RecurrentRows], None],
    *,
    beside: bool,
    parks: bool,
    device: torch.device,
) -> list[Tensor]:
    """What `run` returns for the sequence's rows, pass by pass.

    run: (ids of the pass's input rows [n], spans) -> [n, …]. settle: folds parked rows without a pass.
    """
    said, start = [], 0
    history: list[int] = []
    for turn, n in enumerate(lengths):
        # Two halves of the pool in turn: a pass parks in one what the next reads there.
        half = turn % 2 * (N_PARKED // 2)
        parked = list(range(half, half + n - 1)) if parks else []
        own = [-1] * (n - len(parked)) + parked
        n_settled = len(history) + n - len(parked)
        slots, counts, histories, settled, places = [SLOT], [n], [history], [n_settled], own
        ids = list(range(start, start + n))
        if beside:
            slots, counts = [0, SLOT, 2], [_BEFORE, n, _BEHIND]
            histories, settled = [[], history, []], [_BEFORE, n_settled, _BEHIND]
            places = [-1] * _BEFORE + own + [-1] * _BEHIND
            ids = [*range(60, 60 + _BEFORE), *ids, *range(50, 50 + _BEHIND)]
        spans = _on(device, RecurrentRows.arrays(slots, counts, histories, settled, places))
        out = run(torch.tensor(ids, device=device), spans)
        skip = _BEFORE if beside else 0
        said.append(out[skip : skip + n])
        history, start = parked, start + n
    if history:
        settle(_on(device, RecurrentRows.arrays([SLOT], [0], [history], [len(history)], [])))
    return said


def _on(device: torch.device, arrays: Sequence[IntArray]) -> RecurrentRows:
    return RecurrentRows(*(torch.from_numpy(one).to(device) for one in arrays))
