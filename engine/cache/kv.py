"""Keys and values of an attention layer, indexed by page id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.cache.memory import zeros
from slipstream.engine.cache.need import LayerState, Need, Sizes
from slipstream.engine.ranks import Joint


@dataclass(frozen=True, slots=True)
class KV(Need):
    """What an attention layer needs from the cache, as data."""

    n_kv_heads: int
    d_head: int
    window: int | None = None  # positions a row sees, its own included; None: all before it
    dtype: torch.dtype | None = None  # of keys and values; None: the network's
    d_value: int | None = None  # of a value head; None: as wide as a key head

    @property
    def widths(self) -> tuple[int, int]:
        """Of a key head and of a value head."""
        return self.d_head, self.d_head if self.d_value is None else self.d_value

    def token_bytes(self, dtype: torch.dtype) -> int:
        return self._row_bytes(dtype) if self.window is None else 0

    def window_bytes(self, dtype: torch.dtype) -> int:
        return 0 if self.window is None else self._row_bytes(dtype)

    def kept_in(self, dtype: torch.dtype | None) -> KV:
        return replace(self, dtype=dtype)

    @property
    def page_joints(self) -> Sequence[Joint]:
        return (Joint(1, (self.n_kv_heads,)),) * 2

    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> KVLayer:
        n_pages = sizes.n_pages if self.window is None else sizes.n_window_pages
        shape = (n_pages, self.n_kv_heads, sizes.page_size)
        return KVLayer(*(zeros((*shape, width), self.dtype or dtype, device) for width in self.widths))

    def _row_bytes(self, dtype: torch.dtype) -> int:
        return self.n_kv_heads * sum(self.widths) * (self.dtype or dtype).itemsize


@dataclass(frozen=True, slots=True)
class SharedKV(Need):
    """What an attention layer needs that reads the keys and values of another."""

    layer: int  # its number, below the reader's own

    @property
    def source(self) -> int:
        return self.layer

    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> LayerState:
        return LayerState()


@dataclass(frozen=True, slots=True)
class KVLayer(LayerState):
    """Keys and values of one layer; with a window, by page ids of `WindowPages`.

    Page first, so that sharing and copying a page is one index; then head, so that the keys of one head in
    one page are contiguous, which is what a core reads at a time.
    """

    keys: Tensor  # [n_pages, n_kv_heads, page_size, d_head]
    values: Tensor  # [n_pages, n_kv_heads, page_size, d_value]

    def of_pages(self) -> list[Tensor]:
        return [self.keys, self.values]
