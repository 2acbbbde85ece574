"""K/V stores, indexed by page id. Target and draft networks own one store each on the same page ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FullKV:
    """What a full-attention layer needs from the cache, as data."""

    n_kv_heads: int
    d_head: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.n_kv_heads * self.d_head * dtype.itemsize


class KVStore:
    """Keys and values of all layers of one network: per layer [n_pages, n_kv_heads, page_size, d_head].

    Page first, so that sharing and copying a page is one index; then head, so that the keys of one head in
    one page are contiguous, which is what a core reads at a time.
    """

    def __init__(
        self, layers: list[FullKV], n_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(layer: FullKV) -> Tensor:
            shape = (n_pages, layer.n_kv_heads, page_size, layer.d_head)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.keys = [empty(layer) for layer in layers]
        self.values = [empty(layer) for layer in layers]

    def copy_page(self, source: int, target: int) -> None:
        """Copy all layers' rows of one page onto another, for copy-on-write of a shared page."""
        for tensor in (*self.keys, *self.values):
            tensor[target].copy_(tensor[source])
