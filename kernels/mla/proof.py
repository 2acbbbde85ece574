"""Proof of multi-head latent attention: one sequence of rows, alone and between spans of other sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.mla.op import (
    LatentNorm,
    LatentRope,
    head_linear,
    latent_attention,
    pack_heads,
    write_latents,
)
from slipstream.kernels.norm_rope_write.op import Rope
from slipstream.kernels.proof.case import N_ROWS, Make, Rows
from slipstream.kernels.proof.inputs import PAGE_SIZE, Inputs, Sequences


def of_latent_attention(
    inputs: Inputs, *, coded: bool = False, n_past: int = 700, widths: tuple[int, int, int] = (4, 512, 64)
) -> Rows:
    """widths: heads, of a latent, of what is rotated. coded: latents in float8."""
    n_heads, d_latent, d_rope = widths
    every = Sequences([n_past + N_ROWS, n_past + 300, 90], inputs.device)
    latents = inputs.stored(every.n_pages, PAGE_SIZE, d_latent + d_rope, coded=coded)
    q, q_rope = inputs.normal(N_ROWS, n_heads, d_latent), inputs.normal(N_ROWS, n_heads, d_rope)
    beside, beside_rope = inputs.normal(12, n_heads, d_latent), inputs.normal(12, n_heads, d_rope)
    scale = (d_latent + d_rope) ** -0.5

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows = slice(first, first + n)
        if n in (3, 16):  # beside other spans, which come before and behind
            spans = every.spans([5, n, 7], [n_past + 200, n_past + first, 40], [1, 0, 2])
            own, own_rope = (
                torch.cat((some[:5], one[rows], some[5:]))
                for some, one in ((beside, q), (beside_rope, q_rope))
            )
            return (latent_attention(own, own_rope, latents, spans, scale)[5 : 5 + n],)
        spans = every.spans([n], [n_past + first], [0])
        return (latent_attention(q[rows], q_rope[rows], latents, spans, scale),)

    return Rows(compute)


def of_rows(
    inputs: Inputs, *, interleaved: bool = True, widths: tuple[int, int, int, int] = (6, 96, 512, 64)
) -> Rows:
    """What is written, what is returned, and the product of each head. widths: heads, of a query's plain part, of a
    latent, of what is rotated."""
    n_heads, d_plain, d_latent, d_rope = widths
    every = Sequences([40 + N_ROWS], inputs.device)
    q, kv = inputs.normal(N_ROWS, n_heads, d_plain + d_rope), inputs.normal(N_ROWS, d_latent + d_rope)
    angles = torch.arange(40 + N_ROWS)[:, None] * 0.1 ** (torch.arange(d_rope // 2) / (d_rope // 2))
    tables = Rope(angles.cos().to(inputs.device), angles.sin().to(inputs.device))
    norm = LatentNorm(inputs.normal(d_latent), 1e-6)
    drawn = torch.randn(n_heads, d_latent, d_plain, generator=inputs.g) / d_plain**0.5
    packed = pack_heads(inputs.put(drawn))

    def compute(first: int, n: int) -> Sequence[Tensor]:
        spans, rows = every.spans([n], [40 + first], [0]), slice(first, first + n)
        store = inputs.zeros(every.n_pages, PAGE_SIZE, d_latent + d_rope)
        turned = write_latents(q[rows], kv[rows], norm, LatentRope(tables, interleaved), spans, store)
        return (
            turned,
            store[spans.row_pages, spans.row_offsets],
            head_linear(q[rows, :, :d_plain], packed),
        )

    return Rows(compute)


CASES: Mapping[str, Make] = {
    "attention": of_latent_attention,
    "float8": partial(of_latent_attention, coded=True, n_past=90, widths=(20, 96, 32)),
    "rows": of_rows,
    "rows, not interleaved": partial(of_rows, interleaved=False, widths=(5, 40, 96, 24)),
}
