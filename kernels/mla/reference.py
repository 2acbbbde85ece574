"""Definition of `mla` in plain torch: float32 inside, float64 for float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.attention.spans import Spans
from slipstream.kernels.mla.latent_types import LatentNorm, LatentRope, PackedHeads, check_latents
from slipstream.kernels.norm.reference import rms_norm
from slipstream.kernels.norm_rope_write.reference import as_stored
from slipstream.kernels.norm_rope_write.rows import Rows


@dataclass(frozen=True, slots=True)
class PlainHeads:
    """The matrices as they came."""

    weight: Tensor  # [n_heads, out_features, in_features]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]


def write_latents(
    q: Tensor, kv: Tensor, norm: LatentNorm, rope: LatentRope, rows: Rows, latents: Tensor
) -> Tensor:
    d_latent = norm.weight.shape[0]
    d_rope = kv.shape[1] - d_latent
    key = _rotate(kv[:, None, d_latent:], rope, rows.positions)[:, 0]  # [n_rows, d_rope]
    normed = rms_norm(kv[:, :d_latent], norm.weight, norm.eps)  # [n_rows, d_latent]
    latents[rows.row_pages, rows.row_offsets] = as_stored(torch.cat((normed, key), -1), latents.dtype)
    return _rotate(q[:, :, q.shape[2] - d_rope :], rope, rows.positions)


def pack_heads(weight: Tensor) -> PackedHeads:
    return PlainHeads(weight)


def head_linear(x: Tensor, packed: PackedHeads) -> Tensor:
    if not isinstance(packed, PlainHeads):
        raise TypeError(
            f"reference head_linear got a {type(packed).__name__}; pack the heads with reference too"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.einsum("rhi,hoi->rho", x.to(wide), packed.weight.to(wide)).to(x.dtype)


def latent_attention(q: Tensor, q_rope: Tensor, latents: Tensor, spans: Spans, scale: float) -> Tensor:
    check_latents(q, q_rope, latents)
    wide = torch.promote_types(q.dtype, torch.float32)
    starts, past = spans.span_starts.tolist(), spans.n_past.tolist()
    out, page_size = torch.empty_like(q), latents.shape[1]
    for i, n_past in enumerate(past):
        rows, n_rows = slice(starts[i], starts[i + 1]), starts[i + 1] - starts[i]
        n_seen = n_past + n_rows
        pages = spans.page_table[i, : -(-n_seen // page_size)].long()
        seen = latents[pages].flatten(0, 1)[:n_seen].to(wide)  # [n_seen, d_latent + d_rope]
        queries = torch.cat((q[rows], q_rope[rows]), -1).to(wide)  # [n_rows, n_heads, d_latent + d_rope]
        hidden = torch.ones(n_rows, n_seen, dtype=torch.bool, device=q.device).triu(n_past + 1)
        scores = torch.einsum("rhd,pd->hrp", queries, seen) * scale  # [n_heads, n_rows, n_seen]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hrp,pd->rhd", weights, seen[:, : q.shape[2]]).to(q.dtype)
    return out


def _rotate(
    x: Tensor,  # [n_rows, n_heads, d_rope]
    rope: LatentRope,
    positions: Tensor,  # [n_rows] int64
) -> Tensor:
    if rope.tables is None:
        return x.contiguous()
    cos, sin = rope.tables.cos[positions, None], rope.tables.sin[positions, None]  # [n_rows, 1, d_rope / 2]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = (wide[..., 0::2], wide[..., 1::2]) if rope.interleaved else wide.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
