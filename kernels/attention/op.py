"""Causal attention of ragged spans over paged keys and values. Prefill, decoding and verification are one case."""

from __future__ import annotations

from torch import Tensor

from kernels.attention.spans import Spans as Spans
from kernels.dispatch import op


@op("cpu", "reference")
def attention(q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
    """softmax(scale * q·k) v over positions 0 … p for the row at position p = n_past[i] + (row - starts[i]).

    q: [n_rows, n_heads, d_head]. Query head h reads K/V head h // (n_heads / n_kv_heads).
    keys, values: one layer's store, [n_pages, n_kv_heads, page_size, d_head]; the pass's own rows are in it.
    Returns [n_rows, n_heads * d_head], q's dtype; float32 inside. Rows of the page table past a span's last
    position are not read.
    """
    raise NotImplementedError
