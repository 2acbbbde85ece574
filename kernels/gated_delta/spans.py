"""The updates of a pass to recurrent states: parked rows of earlier passes, then the pass's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """The ragged rows of a pass as recurrent layers see them.

    A span is one sequence of updates to its slot's state: the parked rows named by its history, then its own rows.
    The first `n_settled` of them become part of the stored state; the rest is computed on top of it and not stored.
    A span may have no rows of its own, and no history.

    Rows parked by a span may lie where its own history lies: all of a history is read before a record of the span
    is written. Other than that no two spans name the same parked row, and no two the same slot.
    """

    span_starts: Tensor  # [n_spans + 1] int32: span i owns rows starts[i] … starts[i + 1] - 1
    slot_ids: Tensor  # [n_spans] int32: place of the slot's state
    history_starts: Tensor  # [n_spans + 1] int32: the span's part of history_rows
    history_rows: Tensor  # [n_history] int32: parked rows to apply first, in order
    n_settled: Tensor  # [n_spans] int32: updates that the stored state takes in
    park_rows: Tensor  # [n_rows] int32: where a row's record goes, -1: nowhere

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        spans = self.span_starts, self.slot_ids, self.history_starts, self.history_rows
        return *spans, self.n_settled, self.park_rows

    def checked(self) -> tuple[Tensor, ...]:
        """`tensors`. Raises ValueError where their memory would be read as something else."""
        tensors = self.tensors
        if not all(x.dtype == torch.int32 and x.is_contiguous() for x in tensors):
            raise ValueError("the parts of spans are contiguous int32")
        return tensors

    @staticmethod
    def arrays(
        slots: Sequence[int],
        lengths: Sequence[int],
        history: Sequence[Sequence[int]],
        n_settled: Sequence[int],
        park_rows: Sequence[int],
    ) -> tuple[IntArray, ...]:
        """What the tensors hold, in their order. lengths[i], history[i]: own rows and parked rows of span i."""

        def starts(counts: Sequence[int]) -> IntArray:
            return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)

        def whole(values: Sequence[int]) -> IntArray:
            return np.asarray(values, dtype=np.int32)

        return (
            starts(lengths),
            whole(slots),
            starts([len(rows) for rows in history]),
            whole([row for rows in history for row in rows]),
            whole(n_settled),
            whole(park_rows),
        )
