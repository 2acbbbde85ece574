"""The ragged rows of a pass, as attention sees them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

WIDEST_ON_CUDA = 512  # values of a head that the kernels there take


class Spans(Protocol):
    """The ragged rows of a pass; `engine.batch.Batch` is one. Every span has at least one row."""

    # [n_spans + 1] int32: span i owns rows starts[i] … starts[i + 1] - 1
    @property
    def span_starts(self) -> Tensor: ...

    @property
    def n_past(self) -> Tensor: ...  # [n_spans] int32: place of the span's first row in its page table

    @property
    def page_table(self) -> Tensor: ...  # [n_spans, n_pages_max] int32: page ids of places 0 …

    # [n_rows, 2] int32: begin and end, as places, of what a row belongs to and sees whole, as an image; (p, p + 1) at
    # place p for rows that belong to nothing. It holds the row, may begin before its span and lies in the pages.
    # From row to row of a span begins do not fall, nor do ends. None: all rows belong to nothing.
    @property
    def wholes(self) -> Tensor | None: ...


def check_attention(
    q: Tensor, values: Tensor, spans: Spans, window: int | None, sinks: Tensor | None
) -> None:
    """Raises ValueError for what `attention` refuses everywhere. Shapes as in `op.py`."""
    n_rows, n_heads, d_head = q.shape
    if window is not None and window < 1:  # a row would not even see itself
        raise ValueError(f"a window has at least one position, not {window}")
    if values.shape[3] > d_head:  # kernels have room for the width of keys
        raise ValueError(f"value heads are at most as wide as key heads, {d_head}, not {values.shape[3]}")
    _check_memory("sinks", sinks, (n_heads,), torch.float32)
    _check_memory("wholes", spans.wholes, (n_rows, 2), torch.int32)


def _check_memory(name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if given is None:
        return
    if given.shape != shape or given.dtype != dtype or not given.is_contiguous():
        meant = f"{[*shape]} {str(dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} are {meant}, not {[*given.shape]} {given.dtype}")


def check_batch(spans: Spans, *read: Tensor) -> None:
    """Raises ValueError where compiled code would read the batch, or what it reads with it, as something else."""
    batch = spans.span_starts, spans.n_past, spans.page_table
    if any(one.dtype != torch.int32 for one in batch):
        raise ValueError("span_starts, n_past and page_table are int32")
    if not all(one.is_contiguous() for one in (*batch, *read)):
        raise ValueError("attention takes contiguous tensors")
