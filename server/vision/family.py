"""What families that see images have in common: an image is scaled, cut into patches, and looked at by itself.

By itself, although images come together: torch promises for no product and no softmax that a row's bits do not depend
on the rows beside it, and on GPUs they often do. Pixtral's tower, which packs images into one sequence, gives an image
other last bits beside others (2e-7, float32, CPU); the other towers did not there. One image has rows enough to fill a
product, hundreds or thousands, so little is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from slipstream.engine.api import Image
from slipstream.engine.errors import InvalidRequest, LoadError, UnsupportedModel
from slipstream.engine.images import Ahead, ImageFeatures, ImageLayout


@dataclass(frozen=True, slots=True)
class Parts:
    """What a family is made of."""

    folder: Path
    config: Any  # transformers' config of the whole model
    model: Any  # transformers' model without its language model; has `get_image_features`
    added_tokens: Mapping[int, str]  # the tokenizer's tokens that are found before text is cut
    n_tokens_most: int | None  # --image-max-tokens
    dtype: torch.dtype
    device: torch.device

    def token(self, id: int | None) -> str:
        """The text of a token that the config names. Raises `LoadError`."""
        if id is None or id not in self.added_tokens:
            raise LoadError(
                f"{self.folder}: config.json names token {id} for images, which tokenizer.json does not add"
            )
        return self.added_tokens[id]

    def id_of(self, text: str) -> int:
        """The token with that text. Raises `LoadError`."""
        for id, content in self.added_tokens.items():
            if content == text:
                return id
        raise LoadError(f"{self.folder / 'tokenizer.json'}: does not add the token {text}, which images need")


class Family(ABC):
    """How one family writes, places and looks at images."""

    processor_kind: ClassVar[Any]  # transformers' image processor that runs on Pillow
    modules: ClassVar[tuple[str, ...]]  # of the model, that see images
    inputs: ClassVar[tuple[str, ...]]  # what of the processor's output the model takes
    marker: str
    written: str
    placeholder: int

    def __init__(self, parts: Parts) -> None:
        """Raises `LoadError` for files that say too little, `SettingError` for a size that cannot be had."""
        self.parts = parts
        self.processor = self._read_processor()
        if not self.processor.do_resize:
            raise UnsupportedModel(f"{parts.folder}: its images are not scaled (do_resize is false)")
        self.placeholder = parts.config.image_token_id
        self.marker = self.written = parts.token(self.placeholder)

    @abstractmethod
    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image of so many pixels. Raises `ValueError` for what is not taken."""

    def scaling(self, width: int, height: int) -> dict[str, Any]:
        """What the processor is told besides its own settings, so that it scales as `grid` says."""
        return {}

    def layout(self, width: int, height: int) -> ImageLayout:
        """Of an image of so many pixels. Raises `InvalidRequest` for a size or shape that the model does not take."""
        try:
            n_rows, n_columns = self.grid(width, height)
        except ValueError as error:
            raise InvalidRequest("messages", f"an image of {width} by {height} pixels: {error}") from None
        layout = self.placed(n_rows, n_columns)
        most = self.parts.n_tokens_most
        if most is not None and layout.n_tokens > most:
            raise InvalidRequest(
                "messages",
                f"an image of {width} by {height} pixels takes {layout.n_tokens} tokens however they are scaled;"
                f" --image-max-tokens is {most}",
            )
        return layout

    def placed(self, n_rows: int, n_columns: int) -> ImageLayout:
        """The layout of a grid of tokens."""
        n = n_rows * n_columns
        return ImageLayout((self.placeholder,) * n, np.ones(n, bool), None, n, self.ahead)

    @property
    def ahead(self) -> Ahead:
        """Where rows of an image see those behind them."""
        return "nowhere"

    def look(self, image: Image) -> ImageFeatures:
        """The image's rows, in the run's dtype on its device."""
        picture = PIL.Image.frombytes("RGB", (image.width, image.height), image.pixels)
        made = self.processor([picture], return_tensors="pt", **self.scaling(image.width, image.height))
        with torch.no_grad():
            seen = self.model_sees({name: made[name] for name in self.inputs})
            rows = seen.pooler_output[0].to(self.parts.dtype)  # [n_rows, d_model]
            deep = self.deep(seen)
        return ImageFeatures(rows, deep)

    def model_sees(self, inputs: Mapping[str, Tensor]) -> Any:
        moved = {name: tensor.to(self.parts.device) for name, tensor in inputs.items()}
        return self.parts.model.get_image_features(**moved, return_dict=True)

    def deep(self, seen: Any) -> Tensor | None:
        """[n_deep, n_rows, d_model] of what the tower gives besides its last rows."""
        return None

    def _read_processor(self) -> Any:
        try:
            return self.processor_kind.from_pretrained(str(self.parts.folder), local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise LoadError(f"{self.parts.folder}: does not say how images are prepared ({error})") from None
