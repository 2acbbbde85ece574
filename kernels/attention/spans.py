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


def check_widths(d_head: int, d_value: int) -> None:
    """Raises ValueError for value heads wider than key heads: kernels have room for the width of keys."""
    if d_value > d_head:
        raise ValueError(f"value heads are at most as wide as key heads, {d_head}, not {d_value}")


def check_window(window: int | None) -> None:
    """Raises ValueError for a window in which a row would not even see itself."""
    if window is not None and window < 1:
        raise ValueError(f"a window has at least one position, not {window}")


def check_wholes(wholes: Tensor | None, n_rows: int) -> None:
    """Raises ValueError for wholes that are not a begin and an end, int32, for each row."""
    if wholes is None:
        return
    if wholes.shape != (n_rows, 2) or wholes.dtype != torch.int32 or not wholes.is_contiguous():
        raise ValueError(f"wholes are [{n_rows}, 2] int32, not {[*wholes.shape]} {wholes.dtype}")


def check_sinks(sinks: Tensor | None, n_heads: int) -> None:
    """Raises ValueError for sinks that are not one float32 for each query head."""
    if sinks is None:
        return
    if sinks.shape != (n_heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous():
        raise ValueError(f"sinks are [{n_heads}] float32, not {[*sinks.shape]} {sinks.dtype}")
