"""Images as a network takes them: where they stand in a sequence, and the rows that they are there.

The server decodes an image and has the checkpoint's own tower look at it (`Vision`); the engine puts the rows that the
tower made in the places of tokens. A token id stands in each of these places too, so that all that reads token ids
(drafters, penalties, a network that sees no images) finds one; that the rows differ is in the keys of cached prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.api import Image


@dataclass(frozen=True, slots=True, eq=False)
class ImageLayout:
    """What an image of some size is in a sequence: its tokens, which of them are rows of it, and their positions."""

    token_ids: tuple[
        int, ...
    ]  # the placeholder where a row of the image stands, and what is written between them
    is_row: NDArray[np.bool_]  # [n_tokens]
    # [3, n_tokens] int64: time, height and width from the position of its first token on (M-RoPE, Qwen2-VL,
    # arXiv 2409.12191, 2.1); None: every token stands one position behind the one before.
    axes: NDArray[np.int64] | None
    n_positions: int  # that it takes; text goes on behind them
    sees_whole: bool  # whether each of its rows sees all of them, and not those before it alone

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """The rows that an image is to one network, in its dtype and on its device."""

    rows: Tensor  # [n_rows, d_model], in place of embedded tokens
    deep: Tensor | None = (
        None  # [n_deep, n_rows, d_model]: added to the stream behind block k (DeepStack, Qwen3-VL)
    )

    @property
    def n_bytes(self) -> int:
        return self.rows.nbytes + (0 if self.deep is None else self.deep.nbytes)


class Vision(Protocol):
    """The part of a checkpoint that sees images. Safe to use from several threads."""

    marker: str  # the control token that the chat template writes for an image
    written: str  # what takes its place before the text is tokenised; holds the placeholder's text once
    placeholder: int  # token that stands for an image in the tokenised text; a layout's tokens take its place
    n_bytes: int  # of its weights

    def layout(self, width: int, height: int) -> ImageLayout:
        """Of an image of so many pixels. Raises `InvalidRequest` for a size or shape that the model does not take."""
        ...

    def features(self, image: Image) -> Future[ImageFeatures]:
        """Have the tower look at an image; images that come at once are looked at together.

        The rows are those of `layout`, in order, the same for the same pixels. The future raises `StepFailed`, or
        `DeviceLost`.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image in a sequence."""

    start: int  # index of its first token
    layout: ImageLayout
    key: bytes  # of what it shows
    features: ImageFeatures

    @property
    def end(self) -> int:
        return self.start + self.layout.n_tokens


NO_IMAGES: Sequence[PlacedImage] = ()
