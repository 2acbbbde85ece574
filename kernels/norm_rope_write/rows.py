"""Where the rows of a pass live, and what is done to their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Where each row of a pass lives; `engine.batch.Batch` is one."""

    @property
    def positions(self) -> Tensor: ...  # [n_rows] int64: absolute position

    @property
    def row_pages(self) -> Tensor: ...  # [n_rows] int64: page id that holds the position

    @property
    def row_offsets(self) -> Tensor: ...  # [n_rows] int64: place of the row within its page


def places_of(rows: Rows) -> tuple[Tensor, ...]:
    """Positions, pages and offsets, contiguous. Raises ValueError where they are of another type."""
    places = rows.positions, rows.row_pages, rows.row_offsets
    if any(one.dtype != torch.int64 for one in places):
        raise ValueError("positions, row_pages and row_offsets are int64")
    return tuple(one.contiguous() for one in places)


def count_query_heads(qkv: Tensor, keys: Tensor, values: Tensor) -> int:
    """Query heads of rows qkv that also hold the K/V heads of these stores; shapes as in `norm_rope_write`.

    Raises ValueError for values wider than keys and for rows whose width is not one of whole heads.
    """
    n_kv_heads, d_head, d_value = keys.shape[1], keys.shape[3], values.shape[3]
    if d_value > d_head:
        raise ValueError(f"value heads are at most as wide as key heads, {d_head}, not {d_value}")
    n_heads, rest = divmod(qkv.shape[1] - n_kv_heads * (d_head + d_value), d_head)
    if rest or n_heads < 0:
        raise ValueError(f"rows of {qkv.shape[1]} values hold no whole heads of {d_head} and {d_value}")
    return n_heads


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over d_head of every query and key head (Qwen3, Gemma 3). Their dtype rounds as in `rms_norm`."""

    q: Tensor  # [d_head]
    k: Tensor  # [d_head]
    eps: float
    values: bool = False  # value heads are normed too, without a scale, and rounded once (Gemma 4)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables, any scaling already in them. Dimension i turns with i + rot_dim/2 (half-split, "NeoX").

    rot_dim may be less than d_head: the rest of a head passes unchanged.
    """

    cos: Tensor  # [n_positions_max, rot_dim / 2] float32
    sin: Tensor  # [n_positions_max, rot_dim / 2] float32
    # [n_positions_max] float32: of the rotated queries, for the caller; None: they count as they are
    query_factors: Tensor | None = None
