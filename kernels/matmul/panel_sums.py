"""Products of rows with 64 outputs whose weights lie in a panel: loops of `panel_stack.py`, `narrow.py`, `kernels/mla`.

A sum is one chain in ascending order: of fused multiply-adds in float32, or, for bfloat16, of the instruction that
adds two products at a time where there is one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.compiled import address_of, fetch_once, inlined, shifted
from slipstream.kernels.matmul.formats import PANEL
from slipstream.kernels.pairs import add_pairs
from slipstream.kernels.vector import (
    IS_WIDE,
    WIDTH,
    fma,
    load,
    load_four,
    splat,
    store,
    store_four,
    store_part,
)

STEPS = 32  # steps of the sums taken with all rows before the next: 8 KiB of weights, so that memory is asked steadily
AHEAD = 64  # steps between the weights in use and those that are being fetched


def inputs_per_step(dtype: torch.dtype) -> int:
    return 2 if dtype is torch.bfloat16 else 1


def panels_of(weight: Tensor) -> Tensor:
    """[out, in] transposed in panels: [n_panels, n_steps, 64] float32 or [n_panels, n_steps, 64, 2] bfloat16.

    A step is one input, or two neighbours of bfloat16; what is missing in the last panel and step is zero.
    """
    n_out, n_in = weight.shape
    at_once = inputs_per_step(weight.dtype)
    padded = F.pad(weight, (0, -n_in % at_once, 0, -n_out % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // at_once, at_once).transpose(1, 2).contiguous()


@inlined
def one_panel(rows: Any, weight: Any, bias: Any, target: Any, work: Any) -> None:
    """64 outputs of all rows. rows: (pointer, how many, steps of each); target: (pointer, n_out, panel).

    work: (scratch of (n_rows + 3) * 64 floats, add: (rows, weight, totals) adds the panel's products to [n_rows, 64]).
    """
    n_rows = rows[1]
    out, n_out, panel = target
    totals, add = work
    for row in range(n_rows):
        for i in range(0, PANEL, WIDTH):
            store(totals, row * PANEL + i, load(bias, i))
    add(rows, weight, totals)
    for row in range(n_rows):
        place = shifted(out, row * n_out + panel * PANEL)
        for i in range(0, min(PANEL, n_out - panel * PANEL), WIDTH):
            store_part(place, i, load(totals, row * PANEL + i), n_out - panel * PANEL - i)


@inlined
def add_by_floats(rows: Any, weight: Any, totals: Any) -> None:
    """Add the products of 64 outputs to the totals, [n_rows, 64] float32; inputs and weights are float32."""
    add_steps(rows, weight, 0, (totals, add_floats))


@inlined
def add_by_pairs(rows: Any, weight: Any, totals: Any) -> None:
    """The same of bfloat16, two inputs at a time."""
    add_steps(rows, weight, 0, (totals, add_pairs))


@inlined
def add_steps(rows: Any, weight: Any, first: int, work: Any) -> None:
    """The same from a step on. work: (totals, multiply: (total, inputs, weights) -> total)."""
    x, n_rows, n_steps = rows
    steps = n_steps if n_rows <= 4 else STEPS
    for begin in range(first, n_steps, steps):
        _all_rows(x, (n_rows, n_steps), weight, (begin, min(begin + steps, n_steps)), work)


@inlined
def _all_rows(x: Any, shape: Any, weight: Any, span: Any, work: Any) -> None:
    """64 outputs of all rows, steps begin … end - 1. work: (totals, multiply)."""
    n_rows, n_steps = shape
    totals, multiply = work
    n_fours = (n_rows + 2) // 4
    for row in range(0, n_rows, 4):
        left, start, sums = n_rows - row, shifted(x, row * n_steps), shifted(totals, row * PANEL)
        if left > 1:
            # of two or three rows the last is done twice: cheaper than reading the weights twice
            rows = n_steps, min(2, left - 1) * n_steps, min(3, left - 1) * n_steps
            # Every four rows fetch a share of the next weights, so that memory is neither idle nor in a rush.
            ahead = shifted(weight, AHEAD * PANEL)
            lines = (
                shifted(ahead, row // n_fours * WIDTH),
                shifted(ahead, (row + 1) // n_fours * WIDTH),
                shifted(ahead, (row + 2) // n_fours * WIDTH),
                shifted(ahead, (row + 3) // n_fours * WIDTH),
            )
            if IS_WIDE:
                _four(start, rows, weight, span, (sums, lines, multiply))
            else:
                for i in range(4):
                    part = shifted(weight, i * WIDTH)
                    _quarter(start, rows, part, span, (shifted(sums, i * WIDTH), lines[i], multiply))
        else:
            _one(start, weight, span, sums, multiply)


@inlined
def _four(x: Any, rows: Any, weight: Any, span: Any, work: Any) -> None:
    """The same for four rows; rows: where the last three start; work: (totals, what to fetch meanwhile, multiply)."""
    totals, lines, multiply = work
    next0, next1, next2, next3 = lines
    second, third, fourth = rows
    a0, a1, a2, a3 = load_four(totals, 0)
    b0, b1, b2, b3 = load_four(totals, PANEL)
    c0, c1, c2, c3 = load_four(totals, 2 * PANEL)
    d0, d1, d2, d3 = load_four(totals, 3 * PANEL)
    for k in range(span[0], span[1]):
        at = k * PANEL
        fetch_once(address_of(shifted(next0, at)))
        fetch_once(address_of(shifted(next1, at)))
        fetch_once(address_of(shifted(next2, at)))
        fetch_once(address_of(shifted(next3, at)))
        w0, w1, w2, w3 = load_four(weight, at)
        a, b, c, d = splat(x[k]), splat(x[second + k]), splat(x[third + k]), splat(x[fourth + k])
        a0, a1, a2, a3 = multiply(a0, a, w0), multiply(a1, a, w1), multiply(a2, a, w2), multiply(a3, a, w3)
        b0, b1, b2, b3 = multiply(b0, b, w0), multiply(b1, b, w1), multiply(b2, b, w2), multiply(b3, b, w3)
        c0, c1, c2, c3 = multiply(c0, c, w0), multiply(c1, c, w1), multiply(c2, c, w2), multiply(c3, c, w3)
        d0, d1, d2, d3 = multiply(d0, d, w0), multiply(d1, d, w1), multiply(d2, d, w2), multiply(d3, d, w3)
    store_four(totals, 0, (a0, a1, a2, a3))
    store_four(totals, PANEL, (b0, b1, b2, b3))
    store_four(totals, 2 * PANEL, (c0, c1, c2, c3))
    store_four(totals, 3 * PANEL, (d0, d1, d2, d3))


@inlined
def _quarter(x: Any, rows: Any, weight: Any, span: Any, work: Any) -> None:
    """The same for 16 of the outputs, whose sums a narrow machine can keep in registers; weights are in its cache."""
    totals, line, multiply = work
    second, third, fourth = rows
    a, b = load(totals, 0), load(totals, PANEL)
    c, d = load(totals, 2 * PANEL), load(totals, 3 * PANEL)
    for k in range(span[0], span[1]):
        fetch_once(address_of(shifted(line, k * PANEL)))
        w = load(weight, k * PANEL)
        a, b = multiply(a, splat(x[k]), w), multiply(b, splat(x[second + k]), w)
        c, d = multiply(c, splat(x[third + k]), w), multiply(d, splat(x[fourth + k]), w)
    store(totals, 0, a)
    store(totals, PANEL, b)
    store(totals, 2 * PANEL, c)
    store(totals, 3 * PANEL, d)


@inlined
def _one(x: Any, weight: Any, span: Any, totals: Any, multiply: Any) -> None:
    """The same for one row."""
    a0, a1, a2, a3 = load_four(totals, 0)
    for k in range(span[0], span[1]):
        at, a = k * PANEL, splat(x[k])
        a0, a1 = multiply(a0, a, load(weight, at)), multiply(a1, a, load(weight, at + 16))
        a2, a3 = multiply(a2, a, load(weight, at + 32)), multiply(a3, a, load(weight, at + 48))
    store_four(totals, 0, (a0, a1, a2, a3))


@inlined
def add_floats(total: Any, x: Any, weight: Any) -> Any:
    return fma(x, weight, total)


@inlined
def no_beginning(n_rows: int) -> None:
    """What a thread does before it adds panels."""


@inlined
def no_end() -> None:
    """What it does behind the last."""


# Ways to multiply: inputs of a step, what comes before panels, what adds a panel's products, what comes behind them.
BY_FLOATS = 1, no_beginning, add_by_floats, no_end
BY_PAIRS = 2, no_beginning, add_by_pairs, no_end
