"""Proof of what lies between the qkv product and attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope, norm_rope_write
from slipstream.kernels.proof.case import N_ROWS, Make, Rows
from slipstream.kernels.proof.inputs import PAGE_SIZE, Inputs, Sequences

_N_PAST = 40


def of_norm_rope_write(
    inputs: Inputs,
    *,
    normed: bool = True,
    coded: bool = False,
    values: bool = False,
    heads: tuple[int, int, int] = (8, 2, 64),
    d_value: int | None = None,
) -> Rows:
    """What is returned and what is written. heads, d_value: as in attention. coded: whether float8 holds the same,
    rounded. values: whether values are normed."""
    n_heads, n_kv, d = heads
    every = Sequences([_N_PAST + N_ROWS], inputs.device)
    widths = d, d_value or d
    qkv = inputs.normal(N_ROWS, n_heads * d + n_kv * sum(widths))
    angles = torch.arange(_N_PAST + N_ROWS)[:, None] * 0.1 ** (torch.arange(d // 2) / (d // 2))
    rope = Rope(angles.cos().to(inputs.device), angles.sin().to(inputs.device))
    norms = HeadNorms(inputs.normal(d), inputs.normal(d), 1e-6, values) if normed else None
    shape = every.n_pages, n_kv, PAGE_SIZE

    def compute(first: int, n: int) -> Sequence[Tensor]:
        spans = every.spans([n], [_N_PAST + first], [0])
        stores = [inputs.zeros(*shape, width) for width in widths]
        q = norm_rope_write(qkv[first : first + n], norms, rope, spans, stores[0], stores[1])
        written = [store[spans.row_pages, :, spans.row_offsets] for store in stores]
        alone = norm_rope(qkv[first : first + n, : n_heads * d].contiguous(), d, norms, rope, spans)
        if not coded:
            return q, *written, alone
        codes = [store.to(torch.float8_e4m3fn) for store in stores]
        norm_rope_write(qkv[first : first + n], norms, rope, spans, codes[0], codes[1])
        found = [store.float()[spans.row_pages, :, spans.row_offsets] for store in codes]
        meant = [one.clamp(-448, 448).to(torch.float8_e4m3fn).float() for one in written]
        return q, *(one == other for one, other in zip(found, meant, strict=True))

    return Rows(compute)


CASES: Mapping[str, Make] = {
    "with norms": of_norm_rope_write,
    "without norms": partial(of_norm_rope_write, normed=False, heads=(4, 4, 128)),
    "values too": partial(of_norm_rope_write, values=True, heads=(4, 1, 96)),
    "float8": partial(of_norm_rope_write, coded=True),
    "narrower values": partial(of_norm_rope_write, values=True, heads=(4, 2, 192), d_value=128),
}
