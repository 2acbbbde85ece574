"""Passes some of whose rows belong to images, and what each row sees, written as a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.oracle.test_kernels import Spans, make_spans, random

Stores = tuple[Tensor, Tensor]  # keys and values
Attend = Callable[
    [Tensor, Stores, Spans, int | None, Tensor | None], Tensor
]  # of q, stores, spans, window, sinks


@dataclass(frozen=True)
class Pictured:
    """Spans of a pass, each with the images that its rows belong to, (begin, end) in its places."""

    lengths: Sequence[int]
    past: Sequence[int]
    images: Sequence[Sequence[tuple[int, int]]]
    ahead: bool = False  # rows see what is behind them of their image, but what is before them as text does

    def places(self) -> list[tuple[int, int]]:
        """Span and place of each row."""
        spans = enumerate(zip(self.past, self.lengths, strict=True))
        return [(i, p) for i, (past, n) in spans for p in range(past, past + n)]

    def spans(self, page_size: int) -> Spans:
        """The pass with `wholes`, on pages in no order."""
        wholes = [
            next(((p if self.ahead else b, e) for b, e in self.images[i] if b <= p < e), (p, p + 1))
            for i, p in self.places()
        ]
        plain = make_spans(list(self.lengths), list(self.past), page_size)
        return replace(plain, wholes=torch.tensor(wholes, dtype=torch.int32))

    def seen(self, window: int | None) -> list[Tensor]:
        """What a row sees of its span, [past + length] bool for each row."""
        masks = []
        for i, p in self.places():
            at = torch.arange(self.past[i] + self.lengths[i])
            mask = (at <= p) & (at > p - (window or 10**9))
            for begin, end in self.images[i]:
                if begin <= p < end:
                    mask |= ((p if self.ahead else begin) <= at) & (at < end)
            masks.append(mask)
        return masks

    def meant(
        self, q: Tensor, stores: Stores, spans: Spans, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """[n_rows, n_heads, d_value] float64: a softmax per row and head. Scores are scaled by 0.3."""
        keys, values = (store.double() for store in stores)
        n_heads, (_, n_kv, page_size, d_value) = q.shape[1], values.shape
        out = torch.empty(q.shape[0], n_heads, d_value, dtype=torch.float64)
        for row, ((i, _), mask) in enumerate(zip(self.places(), self.seen(window), strict=True)):
            at = mask.nonzero().flatten()
            page, offset = spans.page_table[i, at // page_size].long(), at % page_size
            for head in range(n_heads):
                h = head // (n_heads // n_kv)
                odds = (keys[page, h, offset] @ q[row, head].double() * 0.3).exp()
                sink = 0.0 if sinks is None else math.exp(sinks[head])
                out[row, head] = odds @ values[page, h, offset] / (odds.sum() + sink)
        return out

    def poisoned(self, stores: Stores, spans: Spans, window: int | None) -> tuple[Stores, Spans]:
        """NaN wherever no row looks, and page ids that do not exist where none is looked up."""
        keys, values = stores
        page_size = keys.shape[2]
        table, clean = torch.full_like(spans.page_table, -(10**6)), torch.zeros(keys.shape[0], page_size) > 0
        for (i, _), mask in zip(self.places(), self.seen(window), strict=True):
            at = mask.nonzero().flatten()
            pages = spans.page_table[i, at // page_size]
            table[i, at // page_size] = pages
            clean[pages.long(), at % page_size] = True
        hidden = ~clean[:, None, :, None]
        nan = keys.new_tensor(float("nan"), dtype=torch.float32).to(keys.dtype)
        return (torch.where(hidden, nan, keys), torch.where(hidden, nan, values)), replace(
            spans, page_table=table
        )


# Images that follow each other at once, that are longer than a block of positions and than the rows of a work item, and
# that begin before their span, in pages written earlier; spans without any beside them.
PASSES = (
    Pictured([12], [0], [[(2, 9)]]),
    Pictured([90, 1, 30], [100, 70, 0], [[(104, 110), (110, 111), (113, 185)], [], [(0, 20), (25, 30)]]),
    Pictured([5, 40, 1], [61, 95, 200], [[], [(63, 97), (120, 135)], [(130, 201)]]),
    Pictured(
        [90, 1, 30], [100, 70, 0], [[(104, 110), (110, 111), (113, 185)], [], [(0, 20), (25, 30)]], ahead=True
    ),
)


def stores_of(spans: Spans, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Stores:
    """Keys and values; shape: K/V heads, page size, d_head, d_value."""
    n_kv, page_size, d_head, d_value = shape
    keys, values = (
        random(spans.n_pages, n_kv, page_size, width, dtype=torch.float32, seed=seed).to(dtype)
        for seed, width in enumerate((d_head, d_value), 1)
    )
    return keys, values


def alone(case: Pictured, row: int, window: int | None, spans: Spans) -> tuple[Spans, int]:
    """A pass of one plain row that sees what `row` of the case does, and the window that it needs for it."""
    i, _ = case.places()[row]
    at = case.seen(window)[row].nonzero().flatten().tolist()
    one = replace(
        spans,
        span_starts=torch.tensor([0, 1], dtype=torch.int32),
        n_past=torch.tensor([at[-1]], dtype=torch.int32),
        page_table=spans.page_table[i : i + 1].contiguous(),
        wholes=None,
    )
    return one, len(at)
