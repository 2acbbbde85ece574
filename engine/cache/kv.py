"""Keys and values of an attention layer, indexed by page id."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import RecurrentRows
from engine.cache.store import Sizes


@dataclass(frozen=True, slots=True)
class FullKV:
    """What a full-attention layer needs from the cache, as data."""

    n_kv_heads: int
    d_head: int

    @property
    def is_recurrent(self) -> bool:
        return False

    @property
    def window(self) -> int | None:
        return None

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.n_kv_heads * self.d_head * dtype.itemsize

    def slot_bytes(self, dtype: torch.dtype) -> int:
        return 0

    def parked_bytes(self, dtype: torch.dtype) -> int:
        return 0

    def window_bytes(self, dtype: torch.dtype) -> int:
        return 0

    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> KVLayer:
        shape = (sizes.n_pages, self.n_kv_heads, sizes.page_size, self.d_head)
        return KVLayer(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class WindowKV:
    """What a layer of sliding-window attention needs from the cache, as data."""

    n_kv_heads: int
    d_head: int
    window: int  # positions a row sees, its own included

    @property
    def is_recurrent(self) -> bool:
        return False

    def token_bytes(self, dtype: torch.dtype) -> int:
        return 0

    def slot_bytes(self, dtype: torch.dtype) -> int:
        return 0

    def parked_bytes(self, dtype: torch.dtype) -> int:
        return 0

    def window_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one position's keys and values in one layer."""
        return 2 * self.n_kv_heads * self.d_head * dtype.itemsize

    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> WindowKVLayer:
        shape = (sizes.n_window_pages, self.n_kv_heads, sizes.page_size, self.d_head)
        return WindowKVLayer(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Keys and values of one layer.

    Page first, so that sharing and copying a page is one index; then head, so that the keys of one head in
    one page are contiguous, which is what a core reads at a time.
    """

    keys: Tensor  # [n_pages, n_kv_heads, page_size, d_head]
    values: Tensor  # [n_pages, n_kv_heads, page_size, d_head]

    def copy_page(self, source: int, target: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[target].copy_(tensor[source])

    def reset(self, slot: int) -> None:
        """Rows past a length are scratch: nothing to do."""

    def settle(self, rows: RecurrentRows) -> None:
        """Nothing is parked here."""

    def of_slot(self, slot: int) -> list[Tensor]:
        return []

    def of_pages(self) -> list[Tensor]:
        return [self.keys, self.values]


@dataclass(frozen=True, slots=True)
class WindowKVLayer:
    """The same of a layer that looks back over a window, by page ids of `WindowPages`."""

    keys: Tensor  # [n_window_pages, n_kv_heads, page_size, d_head]
    values: Tensor  # [n_window_pages, n_kv_heads, page_size, d_head]

    def copy_page(self, source: int, target: int) -> None:
        """Pages of full layers do not concern it."""

    def copy_window_page(self, source: int, target: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[target].copy_(tensor[source])

    def reset(self, slot: int) -> None:
        """Rows past a length are scratch: nothing to do."""

    def settle(self, rows: RecurrentRows) -> None:
        """Nothing is parked here."""

    def of_slot(self, slot: int) -> list[Tensor]:
        return []

    def of_pages(self) -> list[Tensor]:
        return []

    def of_window_pages(self) -> list[Tensor]:
        return [self.keys, self.values]
