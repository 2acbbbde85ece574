"""What happens between the qkv projection and attention: head norms, rotary embedding, K/V page write."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.dispatch import op
from slipstream.kernels.norm_rope_write.rows import HeadNorms as HeadNorms
from slipstream.kernels.norm_rope_write.rows import Rope as Rope
from slipstream.kernels.norm_rope_write.rows import Rows as Rows


@op("triton", "cpu", "reference")
def norm_rope_write(
    qkv: Tensor, norms: HeadNorms | None, rope: Rope, rows: Rows, keys: Tensor, values: Tensor
) -> Tensor:
    """Split qkv, norm and rotate q and k, write k and v into their pages, return q.

    qkv: [n_rows, (n_heads + n_kv_heads) * d_head + n_kv_heads * d_value], query heads first, then key heads, then
    value heads.
    keys, values: one layer's store, [n_pages, n_kv_heads, page_size, d_head] and [n_pages, n_kv_heads, page_size,
    d_value], d_value at most d_head; written in place at [row_pages[r], :, row_offsets[r]]. n_kv_heads and both
    widths are read from them. Where their dtype is float8_e4m3fn, what would have been stored in qkv's is cut to ±448
    and rounded once more, to the nearest, ties to even.
    Returns q: [n_rows, n_heads, d_head]. Norms round as `rms_norm` does; the rotation is float32, rounded once.
    Raises ValueError for values wider than keys and for rows whose width is not one of whole heads.
    """
    raise NotImplementedError


@op("triton", "cpu", "reference")
def norm_rope(q: Tensor, d_head: int, norms: HeadNorms | None, rope: Rope, rows: Rows) -> Tensor:
    """Norm and rotate queries as `norm_rope_write` does, for attention to keys that another layer has written.

    q: [n_rows, n_heads * d_head]. norms: of its fields only `q` and `eps` are read. Returns [n_rows, n_heads, d_head].
    """
    raise NotImplementedError
