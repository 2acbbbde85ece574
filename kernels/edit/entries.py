"""Which logits to change, and by what."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entries:
    """The (row, token) pairs to change, each at most once."""

    rows: Tensor  # [n] int64
    token_ids: Tensor  # [n] int64
    bias: Tensor  # [n] float32
    count: Tensor  # [n] int32: times the token is in the row's output so far
    in_window: Tensor  # [n] bool: the repeat penalty's window holds the token


@dataclass(frozen=True, slots=True)
class Penalties:
    """One value per row of logits."""

    repeat: Tensor  # [n_rows] float32, 1 off
    presence: Tensor  # [n_rows] float32, 0 off
    frequency: Tensor  # [n_rows] float32, 0 off
