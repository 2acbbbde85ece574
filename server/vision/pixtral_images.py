"""Mistral 3, whose tower is Pixtral's: an image keeps its shape, and a token is written behind each row of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.images import ImageLayout
from slipstream.engine.text.json_file import read_object
from slipstream.server.vision.family import Family, Parts


class Pixtral(Family):
    """The side of a token is `side` pixels of the scaled image, whose longer edge has `longest` at most."""

    processor_kind = PixtralImageProcessorPil
    modules = ("vision_tower", "multi_modal_projector")
    inputs = ("pixel_values", "image_sizes")

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        if not self.processor.size["longest_edge"]:
            raise UnsupportedModel(f"{parts.folder}: the size of its images is not said as longest_edge")
        self.longest = self.processor.size["longest_edge"]
        self.side = parts.config.vision_config.patch_size * parts.config.spatial_merge_size
        said = read_object(parts.folder / "processor_config.json")
        self.row_end = parts.id_of(said.get("image_break_token") or "[IMG_BREAK]")
        self.image_end = parts.id_of(said.get("image_end_token") or "[IMG_END]")

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return self._grid(width, height, self._edge(width, height))

    def scaling(self, width: int, height: int) -> dict[str, Any]:
        return {"size": {"longest_edge": self._edge(width, height)}, "patch_size": self.side}

    def _edge(self, width: int, height: int) -> int:
        """The longer edge to which an image of that shape is scaled, so that it takes no more tokens than it may."""
        most = self.parts.n_tokens_most
        edge: int = self.longest
        while most is not None and edge > self.side:
            n_rows, n_columns = self._grid(width, height, edge)
            if n_rows * (n_columns + 1) <= most:
                break
            edge -= self.side
        return edge

    def _grid(self, width: int, height: int, edge: int) -> tuple[int, int]:
        """Raises `ValueError` for an image so narrow that nothing of it is left."""
        blank = np.broadcast_to(np.uint8(0), (3, height, width))
        scaled = get_resize_output_image_size(blank, edge, self.side, ChannelDimension.FIRST)
        if min(scaled) < 1:
            raise ValueError(f"scaled to {edge} pixels on its longer side it has none left on the other")
        return scaled[0] // self.side, scaled[1] // self.side

    def placed(self, n_rows: int, n_columns: int) -> ImageLayout:
        ids = [*[self.placeholder] * n_columns, self.row_end] * n_rows
        ids[-1] = self.image_end
        is_row = np.tile([True] * n_columns + [False], n_rows)
        return ImageLayout(tuple(ids), is_row, None, len(ids))

    def model_sees(self, inputs: Mapping[str, Tensor]) -> Any:
        """transformers takes the one row of a single token for no row, so such an image is shown twice."""
        if int(inputs["image_sizes"].max()) > self.side:
            return super().model_sees(inputs)
        twice = {name: tensor.repeat(2, *[1] * (tensor.dim() - 1)) for name, tensor in inputs.items()}
        return super().model_sees(twice)


FAMILY = Pixtral
