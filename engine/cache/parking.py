"""Parked rows of recurrent layers: which row belongs to which slot's draft. The host side of park and fold.

A recurrent state takes in certain tokens at once. What it would need of a draft is only parked, in a row of a pool;
the slot's next pass folds the rows of the drafts that were kept into the state before anything else. So a rejected
draft is never undone: the state never took it in. All slots share one pool of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slipstream.engine.batch import Span, upload
from slipstream.kernels.gated_delta.spans import RecurrentRows


@dataclass(slots=True)
class _Lane:
    """One slot: its state has taken in `length` tokens, row i of `parked` is that of token `length + i`."""

    length: int = 0
    parked: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)  # reserved, or no longer needed


class Parking:
    """The rows of all recurrent layers of one network; a row number means the same in each of them."""

    def __init__(self, n_slots: int, n_rows: int) -> None:
        self._lanes = [_Lane() for _ in range(n_slots)]
        self._free = list(range(n_rows - 1, -1, -1))

    def length(self, slot: int) -> int:
        """Tokens that the slot's state has taken in; its sequence may be ahead by what is parked."""
        return self._lanes[slot].length

    def reserve(self, slot: int, n_drafts: int) -> bool:
        """Hold rows for `n_drafts` drafts from now on, and no more. Returns False, with no change, if too few are free.

        Rows that a pass folds are read before the slot writes any, so they serve again at once.
        """
        lane = self._lanes[slot]
        n_spare = max(0, n_drafts - len(lane.parked))
        if n_spare - len(lane.spare) > len(self._free):
            return False
        while len(lane.spare) < n_spare:
            lane.spare.append(self._free.pop())
        self._free += lane.spare[n_spare:]
        del lane.spare[n_spare:]
        return True

    def rows(self, spans: Sequence[Span], committed: Sequence[int], device: torch.device) -> RecurrentRows:
        """What recurrent layers read of a pass that is about to run. committed[i]: tokens of span i's slot.

        A span that starts at the committed length moves the state over its certain tokens. A span that starts behind
        it continues drafts of an earlier pass, and has no certain tokens.
        """
        history: list[list[int]] = []
        settled: list[int] = []
        parked: list[int] = []
        for span, length in zip(spans, committed, strict=True):
            lane = self._lanes[span.slot]
            n_known, n_certain = span.n_past - lane.length, len(span.token_ids) - span.n_drafts
            assert 0 <= n_known <= len(lane.parked)
            assert n_certain == 0 or span.n_past == length
            before = lane.parked[:n_known]
            lane.spare += lane.parked[n_known:]
            n_settled = length - lane.length + n_certain
            n_folded = min(n_settled, n_known)
            lane.spare += before[:n_folded]
            fresh = [lane.spare.pop(0) for _ in range(span.n_drafts)]
            lane.parked = before[n_folded:] + fresh
            lane.length += n_settled
            history.append(before)
            settled.append(n_settled)
            parked += [-1] * n_certain + fresh
        lengths = [len(span.token_ids) for span in spans]
        slots = [span.slot for span in spans]
        return RecurrentRows(*upload(RecurrentRows.arrays(slots, lengths, history, settled, parked), device))

    def commit(self, slot: int, length: int) -> None:
        """The sequence has `length` tokens: rows of drafts behind it are not needed."""
        lane = self._lanes[slot]
        assert lane.length <= length <= lane.length + len(lane.parked)
        n_kept = length - lane.length
        lane.spare += lane.parked[n_kept:]
        del lane.parked[n_kept:]

    def settle(self, slot: int, length: int, device: torch.device) -> RecurrentRows | None:
        """Rows to fold so that the state takes in `length` tokens; None if it has already."""
        lane = self._lanes[slot]
        n_folded = length - lane.length
        assert 0 <= n_folded <= len(lane.parked)
        if n_folded == 0:
            return None
        folded = lane.parked[:n_folded]
        del lane.parked[:n_folded]
        lane.spare += folded
        lane.length = length
        return RecurrentRows(*upload(RecurrentRows.arrays([slot], [0], [folded], [n_folded], []), device))

    def reset(self, slot: int, length: int) -> None:
        """The slot's state now stands at `length`, with nothing parked."""
        lane = self._lanes[slot]
        self._free += lane.parked + lane.spare
        self._lanes[slot] = _Lane(length)
