"""Definition of `norm_rope_write` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.norm.reference import rms_norm
from slipstream.kernels.norm_rope_write.rows import HeadNorms, Rope, Rows, count_query_heads


def norm_rope_write(
    qkv: Tensor, norms: HeadNorms | None, rope: Rope, rows: Rows, keys: Tensor, values: Tensor
) -> Tensor:
    n_kv_heads, d_head, d_value = keys.shape[1], keys.shape[3], values.shape[3]
    d_q = count_query_heads(qkv, keys, values) * d_head
    parts = torch.split(qkv, [d_q, n_kv_heads * d_head, n_kv_heads * d_value], dim=1)
    widths = (d_head, d_head, d_value)
    q, k, v = (part.unflatten(1, (-1, width)) for part, width in zip(parts, widths, strict=True))
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        v = _normed(v, norms.eps) if norms.values else v
    keys[rows.row_pages, :, rows.row_offsets] = as_stored(_rotate(k, rope, rows.positions), keys.dtype)
    values[rows.row_pages, :, rows.row_offsets] = as_stored(v, values.dtype)
    return _rotate(q, rope, rows.positions)


def norm_rope(q: Tensor, d_head: int, norms: HeadNorms | None, rope: Rope, rows: Rows) -> Tensor:
    heads = q.view(q.shape[0], -1, d_head)
    return _rotate(heads if norms is None else rms_norm(heads, norms.q, norms.eps), rope, rows.positions)


def _normed(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a store's dtype: float8_e4m3fn keeps what is beyond ±448 as that."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def _rotate(
    x: Tensor,  # [n_rows, n_heads, d_head]
    rope: Rope,
    positions: Tensor,  # [n_rows] int64
) -> Tensor:
    half = rope.cos.shape[1]
    cos, sin = rope.cos[positions, None], rope.sin[positions, None]  # [n_rows, 1, rot_dim / 2]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1).to(x.dtype)
