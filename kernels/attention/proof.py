"""Proof of attention: one sequence of rows, alone and between spans of other sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.attention.op import attention
from slipstream.kernels.proof.case import N_ROWS, Make, Rows
from slipstream.kernels.proof.inputs import Inputs, PagedRows, Sequences

PAGE_SIZE = 64  # as the engine has it: how attention is computed may depend on it


def of_attention(
    inputs: Inputs,
    window: int | None = None,
    *,
    coded: bool = False,
    sunk: bool = False,
    n_past: int = 700,
    heads: tuple[int, int, int] = (8, 2, 64),
    d_value: int | None = None,
    images: Sequence[tuple[int, int]] = (),
) -> Rows:
    """heads: query heads, K/V heads, d_head. d_value: None for d_head. coded: keys and values in float8.
    sunk: with sinks. images: that rows belong to, (begin, end) in rows, of which the first may be before row 0."""
    n_heads, n_kv, d = heads
    every = Sequences([n_past + N_ROWS, n_past + 300, 90], inputs.device, PAGE_SIZE)
    shape = every.n_pages, n_kv, PAGE_SIZE
    keys, values = (inputs.stored(*shape, width, coded=coded) for width in (d, d_value or d))
    q, company = inputs.normal(N_ROWS, n_heads, d), inputs.normal(12, n_heads, d)
    sinks = torch.randn(n_heads, generator=inputs.g).to(inputs.device) if sunk else None

    def compute(first: int, n: int) -> Sequence[Tensor]:
        if n in (3, 16):  # beside other spans, which come before and behind
            spans = every.spans([5, n, 7], [n_past + 200, n_past + first, 40], [1, 0, 2])
            spans = _seeing(spans, slice(5, 5 + n), [(n_past + begin, n_past + end) for begin, end in images])
            rows = torch.cat((company[:5], q[first : first + n], company[5:]))
            return (attention(rows, keys, values, spans, d**-0.5, window, sinks)[5 : 5 + n],)
        spans = every.spans([n], [n_past + first], [0])
        spans = _seeing(spans, slice(n), [(n_past + begin, n_past + end) for begin, end in images])
        return (attention(q[first : first + n], keys, values, spans, d**-0.5, window, sinks),)

    return Rows(compute)


def _seeing(spans: PagedRows, own: slice, images: Sequence[tuple[int, int]]) -> PagedRows:
    """The pass whose rows `own` belong to the images, (begin, end) in places, that they lie in; its others to none."""
    if not images:
        return spans
    places = spans.positions  # [n_rows]
    wholes = torch.stack((places, places + 1), 1)
    for begin, end in images:
        within = (places[own] >= begin) & (places[own] < end)
        wholes[own] = torch.where(within[:, None], wholes.new_tensor([begin, end]), wholes[own])
    return replace(spans, wholes=wholes.int())


CASES: Mapping[str, Make] = {
    "full": of_attention,
    "window and sinks": partial(of_attention, heads=(4, 4, 128), n_past=130, window=100, sunk=True),
    "float8": partial(of_attention, coded=True, window=600),
    "narrower values": partial(of_attention, heads=(4, 2, 192), d_value=128, n_past=530),
    "images": partial(of_attention, n_past=470, images=((-40, 12), (12, 30), (35, 69))),
    "images and a window": partial(
        of_attention, heads=(4, 1, 256), n_past=500, window=20, images=((-60, 30), (31, 60))
    ),
    "wide heads": partial(of_attention, heads=(4, 1, 512), n_past=505),
}
