"""What a decoder does with rows that are images'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.layers.rope import RopeSpec, mixed_angles
from slipstream.kernels.norm_rope_write.op import Rope


def with_images(batch: Batch, embedded: Tensor) -> Tensor:
    """The rows that go into the first block, [n_tokens, d_model]: of images, what the tower made of them."""
    images = batch.images
    return embedded if images is None else embedded.index_copy(0, images.index, images.features)


def padded(batch: Batch, pad_id: int) -> Tensor:
    """Token ids, [n_tokens] int64, with padding where images are."""
    return (
        batch.token_ids if batch.images is None else batch.token_ids.index_fill(0, batch.images.index, pad_id)
    )


def turned(batch: Batch, ropes: Mapping[RopeSpec, Rope]) -> Batch:
    """The batch with angles of its own, if rows of images have a position on each axis (M-RoPE)."""
    images = batch.images
    if images is None or images.axes is None:
        return batch
    ((spec, rope),) = [one for one in ropes.items() if one[0].sections]
    axes = batch.positions.expand(3, -1).clone()  # [3, n_tokens]
    axes[:, images.index] = images.axes
    assert rope.query_factors is None  # of no family with sections
    angles = Rope(*mixed_angles((rope.cos, rope.sin), spec, axes))
    rows = torch.arange(len(batch.positions), device=axes.device)  # [n_tokens]
    window = None if batch.window is None else replace(batch.window, rope=angles, positions=rows)
    return replace(batch, rope=angles, positions=rows, window=window)
