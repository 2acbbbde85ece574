"""Causal attention of ragged spans over paged keys and values. Prefill, decoding and verification are one case."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.attention.spans import WIDEST_ON_CUDA as WIDEST_ON_CUDA
from slipstream.kernels.attention.spans import Spans as Spans
from slipstream.kernels.dispatch import op


@op("cuda", "cpu", "reference")
def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Spans,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q·k) v over positions 0 … p for the row at position p = n_past[i] + (row - starts[i]).

    With a window only the last so many of them, p - window + 1 … p: the row's own position counts.
    A row that belongs to something whole, as an image (`Spans.wholes`), sees that too, also behind itself and before
    its window: places min(first, begin) … max(p + 1, end) - 1, where first … p are the positions above.
    A sink is one more score in a head's softmax, which takes its share of the weight and brings no value (StreamingLLM,
    arXiv 2309.17453, 3.3; learned, gpt-oss).

    q: [n_rows, n_heads, d_head]. Query head h reads K/V head h // (n_heads / n_kv_heads).
    keys, values: one layer's store, [n_pages, n_kv_heads, page_size, d_head] and [n_pages, n_kv_heads, page_size,
    d_value], d_value at most d_head; the pass's own rows are in it. Their dtype is q's, or float8_e4m3fn whatever q's
    is: then a code stands for its value, and nothing is scaled.
    sinks: [n_heads] float32, finite, not multiplied by scale; None: no head has one.
    Returns [n_rows, n_heads * d_value], q's dtype; float32 inside. Neither what lies before all that a span's first
    row sees nor what lies past all that its last row sees is read, and the page table may hold anything there.
    Raises ValueError for a window below 1, for sinks and wholes of another shape or dtype and for values wider than
    keys.
    """
    raise NotImplementedError
