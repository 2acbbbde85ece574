"""Qwen2.5-VL, Qwen3-VL and Qwen3.5: patches of any grid, two by two to a token; positions in time, height and width."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from slipstream.engine.images import ImageLayout
from slipstream.server.vision.family import Family, Parts


class QwenVL(Family):
    """The side of a token is `factor` pixels of the scaled image, whose sides are multiples of it."""

    processor_kind = Qwen2VLImageProcessorPil
    modules = ("visual",)
    inputs = ("pixel_values", "image_grid_thw")

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.factor = self.processor.patch_size * self.processor.merge_size
        most = self.processor.size["longest_edge"]  # pixels, for all that it is called an edge
        if parts.n_tokens_most is not None:
            most = min(most, parts.n_tokens_most * self.factor**2)
        self.most = most
        self.least = min(self.processor.size["shortest_edge"], most)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        scaled = smart_resize(height, width, self.factor, self.least, self.most)
        return scaled[0] // self.factor, scaled[1] // self.factor

    def scaling(self, width: int, height: int) -> dict[str, Any]:
        return {"size": {"shortest_edge": self.least, "longest_edge": self.most}}

    def placed(self, n_rows: int, n_columns: int) -> ImageLayout:
        flat = super().placed(n_rows, n_columns)
        rows, columns = np.divmod(np.arange(n_rows * n_columns, dtype=np.int64), n_columns)
        axes = np.stack([np.zeros_like(rows), rows, columns])  # time, height and width of a still image
        return ImageLayout(flat.token_ids, flat.is_row, axes, max(n_rows, n_columns))

    def deep(self, seen: Any) -> Tensor | None:
        deep = getattr(seen, "deepstack_features", None)  # by block, then by image
        return torch.stack([images[0] for images in deep]).to(self.parts.dtype) if deep else None


FAMILY = QwenVL
