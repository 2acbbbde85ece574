"""Latents of a layer with multi-head latent attention, indexed by page id: one row per position for all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.cache.memory import zeros
from slipstream.engine.cache.need import LayerState, Need, Sizes


@dataclass(frozen=True, slots=True)
class Latent(Need):
    """What such a layer needs from the cache, as data."""

    d_latent: int
    d_rope: int  # of the rotated key beside the latent
    dtype: torch.dtype | None = None  # of the rows; None: the network's

    def token_bytes(self, dtype: torch.dtype) -> int:
        return (self.d_latent + self.d_rope) * (self.dtype or dtype).itemsize

    def kept_in(self, dtype: torch.dtype | None) -> Latent:
        return replace(self, dtype=dtype)

    @property
    def page_joints(self) -> Sequence[None]:
        return (None,)

    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> LatentLayer:
        shape = sizes.n_pages, sizes.page_size, self.d_latent + self.d_rope
        return LatentLayer(zeros(shape, self.dtype or dtype, device))


@dataclass(frozen=True, slots=True)
class LatentLayer(LayerState):
    """The rows of one layer: a latent, then the key that its position has rotated."""

    latents: Tensor  # [n_pages, page_size, d_latent + d_rope]

    def of_pages(self) -> list[Tensor]:
        return [self.latents]
