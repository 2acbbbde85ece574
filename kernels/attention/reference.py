"""Definition of `attention` in plain torch: one dense softmax per span, float32 inside (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.spans import Spans


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def attention(q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
    starts, past = spans.span_starts.tolist(), spans.n_past.tolist()
    out = torch.empty_like(q)
    for i, n_past in enumerate(past):
        rows = slice(starts[i], starts[i + 1])
        n_seen = n_past + starts[i + 1] - starts[i]
        n_pages = -(-n_seen // keys.shape[2])
        pages = spans.page_table[i, :n_pages].long()
        out[rows] = _dense(q[rows], _read(keys, pages, n_seen), _read(values, pages, n_seen), n_past, scale)
    return out.flatten(1)


def _read(
    store: Tensor,  # [n_pages, n_kv_heads, page_size, d_head]
    pages: Tensor,  # [n] int64
    n_seen: int,
) -> Tensor:  # [n_kv_heads, n_seen, d_head]
    return store[pages].transpose(0, 1).flatten(1, 2)[:, :n_seen]


def _dense(
    q: Tensor,  # [n_rows, n_heads, d_head]
    k: Tensor,  # [n_kv_heads, n_seen, d_head]
    v: Tensor,  # [n_kv_heads, n_seen, d_head]
    n_past: int,
    scale: float,
) -> Tensor:  # [n_rows, n_heads, d_head]
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[0]
    k, v = (x.to(wide).repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("rhd,hpd->hrp", q.to(wide), k) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(n_past + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hrp,hpd->rhd", weights, v).to(q.dtype)
