"""Definition of `attention` in plain torch: one dense softmax per span, float32 inside (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.attention.spans import Spans, check_attention


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Spans,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    check_attention(q, values, spans, window, sinks)
    starts, past = spans.span_starts.tolist(), spans.n_past.tolist()
    out = q.new_empty(*q.shape[:2], values.shape[3])
    for i, n_past in enumerate(past):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            continue
        places = torch.arange(n_past, n_past + rows.stop - rows.start)
        seen = _seen(places, window, None if spans.wholes is None else spans.wholes[rows])
        first, end = int(seen[:, 0].min()), int(seen[:, 1].max())
        k, v = (_read(store, spans.page_table[i], first, end) for store in (keys, values))
        out[rows] = _dense(q[rows], k, v, _hidden(seen.to(q.device), first, end), scale, sinks)
    return out.flatten(1)


def _read(
    store: Tensor,  # [n_pages, n_kv_heads, page_size, width]
    table: Tensor,  # [n_pages_max] int32
    first: int,
    end: int,
) -> Tensor:  # [n_kv_heads, end - first, width]
    page_size = store.shape[2]
    first_page = first // page_size
    pages = table[first_page : -(-end // page_size)].long()
    skipped = first_page * page_size
    return store[pages].transpose(0, 1).flatten(1, 2)[:, first - skipped : end - skipped]


def _seen(places: Tensor, window: int | None, wholes: Tensor | None) -> Tensor:
    """First place that a row at each of `places` sees, and the end, [n_rows, 2], on the host."""
    firsts = torch.zeros_like(places) if window is None else (places - window + 1).clamp_min(0)
    ends = places + 1
    if wholes is not None:
        begun, ended = wholes.cpu().unbind(1)
        firsts, ends = torch.minimum(firsts, begun), torch.maximum(ends, ended)
    return torch.stack((firsts, ends), 1)


def _hidden(seen: Tensor, first: int, end: int) -> Tensor:
    """Which of the places first … end - 1 each row does not see, [n_rows, end - first] bool. seen: of `_seen`."""
    places = torch.arange(first, end, device=seen.device)
    return (places < seen[:, :1]) | (places >= seen[:, 1:])


def _dense(
    q: Tensor,  # [n_rows, n_heads, d_head]
    k: Tensor,  # [n_kv_heads, n_seen, d_head]
    v: Tensor,  # [n_kv_heads, n_seen, d_value]
    hidden: Tensor,  # [n_rows, n_seen] bool
    scale: float,
    sinks: Tensor | None,  # [n_heads]
) -> Tensor:  # [n_rows, n_heads, d_value]
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[0]
    k, v = (x.to(wide).repeat_interleave(group, 0) for x in (k, v))
    scores = (torch.einsum("rhd,hpd->hrp", q.to(wide), k) * scale).masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide)[:, None, None].expand(-1, q.shape[0], 1)  # [n_heads, n_rows, 1]
        scores = torch.cat((scores, column), -1)  # [n_heads, n_rows, n_seen + 1]
    weights = scores.softmax(-1)[..., : k.shape[1]]  # [n_heads, n_rows, n_seen]
    return torch.einsum("hrp,hpd->rhd", weights, v).to(q.dtype)
