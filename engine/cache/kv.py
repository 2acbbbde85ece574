"""Keys and values of an attention layer, indexed by page id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.cache.store import LayerState, Need, Sizes


@dataclass(frozen=True, slots=True)
class FullKV(Need):
    """What a full-attention layer needs from the cache, as data."""

    n_kv_heads: int
    d_head: int
    dtype: torch.dtype | None = None  # of keys and values; None: the network's

    def token_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.n_kv_heads * self.d_head * (self.dtype or dtype).itemsize

    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> KVLayer:
        shape = (sizes.n_pages, self.n_kv_heads, sizes.page_size, self.d_head)
        return KVLayer(*(torch.zeros(shape, dtype=self.dtype or dtype, device=device) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class WindowKV(Need):
    """What a layer of sliding-window attention needs from the cache, as data."""

    n_kv_heads: int
    d_head: int
    reach: int  # positions a row sees, its own included
    dtype: torch.dtype | None = None  # of keys and values; None: the network's

    @property
    def window(self) -> int:
        return self.reach

    def window_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.n_kv_heads * self.d_head * (self.dtype or dtype).itemsize

    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> WindowKVLayer:
        shape = (sizes.n_window_pages, self.n_kv_heads, sizes.page_size, self.d_head)
        return WindowKVLayer(
            *(torch.zeros(shape, dtype=self.dtype or dtype, device=device) for _ in range(2))
        )


def keep_keys_in(needs: Sequence[Need], dtype: torch.dtype | None) -> list[Need]:
    """The same needs with keys and values in a dtype of their own (None: the network's); states stay as they are."""
    return [replace(need, dtype=dtype) if isinstance(need, FullKV | WindowKV) else need for need in needs]


@dataclass(frozen=True, slots=True)
class KVLayer(LayerState):
    """Keys and values of one layer.

    Page first, so that sharing and copying a page is one index; then head, so that the keys of one head in
    one page are contiguous, which is what a core reads at a time.
    """

    keys: Tensor  # [n_pages, n_kv_heads, page_size, d_head]
    values: Tensor  # [n_pages, n_kv_heads, page_size, d_head]

    def copy_page(self, source: int, target: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[target].copy_(tensor[source])

    def of_pages(self) -> list[Tensor]:
        return [self.keys, self.values]


@dataclass(frozen=True, slots=True)
class WindowKVLayer(LayerState):
    """The same of a layer that looks back over a window, by page ids of `WindowPages`."""

    keys: Tensor  # [n_window_pages, n_kv_heads, page_size, d_head]
    values: Tensor  # [n_window_pages, n_kv_heads, page_size, d_head]

    def copy_window_page(self, source: int, target: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[target].copy_(tensor[source])

    def of_window_pages(self) -> list[Tensor]:
        return [self.keys, self.values]
