"""The updates of a pass to recurrent states: parked rows of earlier passes, then the pass's own rows."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class RecurrentSpans(Protocol):
    """The ragged rows of a pass as recurrent layers see them; `engine.batch.Batch` is one.

    A span is one sequence of updates to its slot's state: the parked rows named by its history, then its own rows.
    The first `n_settled` of them become part of the stored state; the rest is computed on top of it and not stored.
    A span may have no rows of its own, and no history.

    Rows parked by a span may lie where its own history lies: all of a history is read before a record of the span
    is written. Other than that no two spans name the same parked row, and no two the same slot.
    """

    # [n_spans + 1] int32: span i owns rows starts[i] … starts[i + 1] - 1
    @property
    def span_starts(self) -> Tensor: ...

    @property
    def slot_ids(self) -> Tensor: ...  # [n_spans] int32: place of the slot's state

    @property
    def history_starts(self) -> Tensor: ...  # [n_spans + 1] int32: the span's part of history_rows

    @property
    def history_rows(self) -> Tensor: ...  # [n_history] int32: parked rows to apply first, in order

    @property
    def n_settled(self) -> Tensor: ...  # [n_spans] int32: updates that the stored state takes in

    @property
    def park_rows(self) -> Tensor: ...  # [n_rows] int32: where a row's record goes, -1: nowhere


def parts_of(spans: RecurrentSpans) -> tuple[Tensor, ...]:
    """The six tensors, in the order above. Raises ValueError where their memory would be read as something else."""
    parts = spans.span_starts, spans.slot_ids, spans.history_starts, spans.history_rows
    parts = *parts, spans.n_settled, spans.park_rows
    if not all(x.dtype == torch.int32 and x.is_contiguous() for x in parts):
        raise ValueError("the parts of spans are contiguous int32")
    return parts
