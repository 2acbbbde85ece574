"""Spans and the ragged batch: one shape for prefill, decoding and verification, with no phase flag.

A *span* is one slot's tokens in one pass; a *row* is one position. Plain decoding is a span of one token,
verification a span of 1 + n_drafts, a prompt chunk a span of many; nothing downstream tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One slot's tokens in one pass: certain tokens first, drafts last."""

    slot: int
    token_ids: Sequence[int]
    n_past: int  # tokens of the slot whose state is committed in the store this pass writes
    n_drafts: int  # trailing tokens that are provisional
    n_logits: int  # trailing rows whose logits are wanted


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """What recurrent layers must know of a pass (`kernels.gated_delta.spans`), as device tensors.

    A span's updates are the parked rows of its history, in order, then its own rows; its state takes in the first
    `n_settled` of them.
    """

    span_starts: Tensor  # [n_spans + 1] int32
    slot_ids: Tensor  # [n_spans] int32: whose state it is
    history_starts: Tensor  # [n_spans + 1] int32
    history_rows: Tensor  # [n_history] int32
    n_settled: Tensor  # [n_spans] int32
    park_rows: Tensor  # [n_tokens] int32: where a row's record is kept; -1 for rows that are certain

    @classmethod
    def build(
        cls,
        slots: Sequence[int],
        lengths: Sequence[int],
        history: Sequence[Sequence[int]],
        n_settled: Sequence[int],
        park_rows: Sequence[int],
        device: torch.device,
    ) -> RecurrentRows:
        """lengths[i], history[i]: own rows and parked rows of span i."""

        def starts(counts: Sequence[int]) -> Tensor:
            return upload(np.concatenate(([0], np.cumsum(counts))).astype(np.int32), device)

        def whole(values: Sequence[int]) -> Tensor:
            return upload(np.asarray(values, dtype=np.int32), device)

        return cls(
            span_starts=starts(lengths),
            slot_ids=whole(slots),
            history_starts=starts([len(rows) for rows in history]),
            history_rows=whole([row for rows in history for row in rows]),
            n_settled=whole(n_settled),
            park_rows=whole(park_rows),
        )


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of one pass as device tensors. Span i owns rows span_starts[i] … span_starts[i + 1] - 1."""

    spans: Sequence[Span]
    token_ids: Tensor  # [n_tokens] int64
    positions: Tensor  # [n_tokens] int64: absolute position of each row
    span_starts: Tensor  # [n_spans + 1] int32
    n_past: Tensor  # [n_spans] int32
    page_table: Tensor  # [n_spans, n_pages_max] int32: page ids of positions 0 …; 0 past the end
    row_pages: Tensor  # [n_tokens] int64: page id that holds each row's position
    row_offsets: Tensor  # [n_tokens] int64: place of the row within its page
    logit_index: Tensor  # [n_logits] int64: rows whose logits are wanted
    recurrent: RecurrentRows | None = None  # for networks with recurrent layers
    window: Batch | None = None  # the same rows in the pages of layers that look back over a window

    @classmethod
    def build(
        cls,
        spans: Sequence[Span],
        tables: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device,
        recurrent: RecurrentRows | None = None,
    ) -> Batch:
        """`tables[i]` is the page table of span i's slot; it covers the span's last position."""
        lengths = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
        past = np.array([span.n_past for span in spans], dtype=np.int64)
        starts = np.zeros(len(spans) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        owner = np.repeat(np.arange(len(spans)), lengths)
        positions = past[owner] + np.arange(starts[-1]) - starts[:-1][owner]
        table = _joined(tables)
        token_ids = np.concatenate([np.asarray(span.token_ids, dtype=np.int64) for span in spans])
        index = [np.arange(end - span.n_logits, end) for span, end in zip(spans, starts[1:], strict=True)]

        def up(array: np.ndarray) -> Tensor:
            return upload(array, device)

        return cls(
            spans=spans,
            token_ids=up(token_ids),
            positions=up(positions),
            span_starts=up(starts.astype(np.int32)),
            n_past=up(past.astype(np.int32)),
            page_table=up(table),
            row_pages=up(table[owner, positions // page_size].astype(np.int64)),
            row_offsets=up(positions % page_size),
            logit_index=up(np.concatenate(index).astype(np.int64)),
            recurrent=recurrent,
        )

    def on_pages(self, tables: Sequence[Sequence[int]], page_size: int) -> Batch:
        """The same rows in other pages of that size. `tables`: as in `build`."""
        spans = zip(self.spans, tables, strict=True)
        pages = [
            one[position // page_size]
            for span, one in spans
            for position in range(span.n_past, span.n_past + len(span.token_ids))
        ]
        return replace(
            self,
            page_table=upload(_joined(tables), self.positions.device),
            row_pages=upload(np.array(pages, dtype=np.int64), self.positions.device),
        )


def _joined(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """[n_spans, n_pages_max] int32."""
    table = np.zeros((len(tables), max(len(one) for one in tables)), dtype=np.int32)
    for i, one in enumerate(tables):
        table[i, : len(one)] = one
    return table
