"""Images as a network takes them: where they stand in a sequence, and the rows that they are there.

The server decodes an image and has the checkpoint's own tower look at it (`Vision`); the engine puts the rows that the
tower made in the places of tokens. A token id stands in each of these places too, so that all that reads token ids
(drafters, penalties, a network that sees no images) finds one; that the rows differ is in the keys of cached prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.api import Image
from slipstream.engine.settings import Settings

# Where a row of an image also sees the rows of it that come behind: in no layer, like text; in all (Gemma 3); or in
# those with a window (Gemma 4). Windows reach back no further for it.
Ahead = Literal["nowhere", "everywhere", "in windows"]


@dataclass(frozen=True, slots=True, eq=False)
class ImageLayout:
    """What an image of some size is in a sequence: its tokens, which of them are rows of it, and their positions."""

    # The placeholder where a row of the image stands, and what is written between them.
    token_ids: tuple[int, ...]
    is_row: NDArray[np.bool_]  # [n_tokens]
    # [3, n_tokens] int64: time, height and width from the position of its first token on (M-RoPE, Qwen2-VL,
    # arXiv 2409.12191, 2.1); None: every token stands one position behind the one before.
    axes: NDArray[np.int64] | None
    n_positions: int  # that it takes; text goes on behind them
    ahead: Ahead = "nowhere"

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """The rows that an image is to one network, in its dtype and on its device."""

    rows: Tensor  # [n_rows, d_model], in place of embedded tokens
    # [n_deep, n_rows, d_model]: added to the stream behind block k (DeepStack, Qwen3-VL).
    deep: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        return self.rows.nbytes + (0 if self.deep is None else self.deep.nbytes)


class Vision(Protocol):
    """The part of a checkpoint that sees images. Safe to use from several threads."""

    marker: str  # the control token that the chat template writes for an image
    written: str  # what takes its place before the text is tokenised; holds the placeholder's text once
    placeholder: int  # token that stands for an image in the tokenised text; a layout's tokens take its place

    def layout(self, width: int, height: int) -> ImageLayout:
        """Of an image of so many pixels. Raises `InvalidRequest` for a size or shape that the model does not take."""
        ...

    def features(self, image: Image) -> Future[ImageFeatures]:
        """Have the tower look at an image, behind those that came before it.

        The rows are those of `layout`, in order, the same for the same pixels whatever is looked at besides. The future
        raises `StepFailed`, or `DeviceLost`.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ImageMark:
    """An image that is in a sequence, without what it is to a network."""

    start: int
    end: int
    key: bytes

    @classmethod
    def of(cls, image: Marked) -> ImageMark:
        return cls(image.start, image.end, image.key)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image in a sequence, as one network takes it."""

    start: int
    layout: ImageLayout
    key: bytes
    features: ImageFeatures

    @property
    def end(self) -> int:
        return self.start + self.layout.n_tokens


# Where an image is in a sequence, and what it shows: what keys of prefixes are made of.
Marked = ImageMark | PlacedImage

# Of a checkpoint's folder or file, in a dtype on a device; None: it has nothing that sees images.
OpenVision = Callable[[Path, torch.dtype, torch.device, Settings], Vision | None]

NO_IMAGES: Sequence[PlacedImage] = ()


def positions_of(images: Sequence[PlacedImage], start: int, end: int) -> NDArray[np.int64]:
    """By which tokens [start, end) of a sequence turn their queries and keys, [end - start] int64.

    Tokens behind an image that takes fewer positions than it has tokens stand so much earlier. Those of an image with
    axes have positions of their own (`ImageRows.axes`).
    """
    positions = np.arange(start, end)
    for one in images:
        positions[max(0, one.end - start) :] -= one.layout.n_tokens - one.layout.n_positions
    return positions


def cut_before(images: Sequence[PlacedImage], start: int, end: int) -> int:
    """Where a pass over [start, end) has to end so that no image is cut whose rows see what comes behind them.

    That is before the image, or behind it if it is the first there: such an image is computed in one pass, however many
    rows a pass may have.
    """
    for one in images:
        if one.layout.ahead != "nowhere" and one.start < end < one.end:
            return one.start if one.start > start else one.end
    return end


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rows of a pass that are images'."""

    index: Tensor  # [n_image_rows] int64: which rows
    features: Tensor  # [n_image_rows, d_model]
    axes: Tensor | None = None  # [3, n_image_rows] int64: their positions in time, height and width
    deep: Tensor | None = None  # [n_deep, n_image_rows, d_model]

    @property
    def parts(self) -> dict[str, Tensor]:
        """What there is of it, by name."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def deep_rows(self) -> Sequence[tuple[Tensor, Tensor]]:
        """What is added behind each of the first blocks: to which rows, and their `deep`."""
        return [] if self.deep is None else [(self.index, one) for one in self.deep]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens [start, end) of a sequence with these images, whose rows lie in a page table from token `origin` on."""

    images: Sequence[PlacedImage]
    start: int
    end: int
    origin: int = 0

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def positions(self) -> NDArray[np.int64]:
        """By which positions its rows turn, [n_rows] int64."""
        return positions_of(self.images, self.start, self.end)

    def __iter__(self) -> Iterator[tuple[PlacedImage, int, int]]:
        """The images that have tokens in it, each with which of its tokens these are."""
        for one in self.images:
            if one.start < self.end and one.end > self.start:
                yield one, max(0, self.start - one.start), min(self.end, one.end) - one.start


def image_rows(stretches: Sequence[Stretch]) -> ImageRows | None:
    """The rows of images in a pass over these stretches, on the host but for features; None: there are none."""
    index, axes, rows, deep = [], [], list[Tensor](), list[Tensor]()
    for stretch, first in zip(stretches, _firsts(stretches), strict=True):
        for one, begin, end in stretch:
            own = np.flatnonzero(one.layout.is_row[begin:end])  # of the image's tokens in the stretch
            n_before = int(one.layout.is_row[:begin].sum())
            taken = slice(n_before, n_before + len(own))
            index.append(first + one.start + begin - stretch.start + own)
            rows.append(one.features.rows[taken])
            if one.features.deep is not None:
                deep.append(one.features.deep[:, taken])
            if one.layout.axes is not None:
                base = positions_of(stretch.images, one.start, one.start + 1)
                axes.append(base + one.layout.axes[:, begin:end][:, own])
    if not index:
        return None
    return ImageRows(
        torch.from_numpy(np.concatenate(index)),
        torch.cat(rows),
        torch.from_numpy(np.concatenate(axes, 1)) if axes else None,
        torch.cat(deep, 1) if deep else None,
    )


def wholes_of(stretches: Sequence[Stretch], *, windowed: bool) -> Tensor | None:
    """[n_rows, 2] int32: places of the page table that a row sees, beside what text would see there; None: nothing.

    A row without such a place has its own and the next. windowed: in layers with a window.
    """
    kinds = ("everywhere", "in windows") if windowed else ("everywhere",)
    if not any(one.layout.ahead in kinds for stretch in stretches for one, _, _ in stretch):
        return None
    places = np.concatenate([np.arange(one.start, one.end) - one.origin for one in stretches])
    wholes = np.stack((places, places + 1), 1).astype(np.int32)
    for stretch, first in zip(stretches, _firsts(stretches), strict=True):
        for one, begin, end in stretch:
            if one.layout.ahead not in kinds:
                continue
            rows = slice(first + one.start + begin - stretch.start, first + one.start + end - stretch.start)
            wholes[rows, 1] = one.start + end - stretch.origin
    return torch.from_numpy(wholes)


def _firsts(stretches: Sequence[Stretch]) -> list[int]:
    """The first row of each stretch."""
    return list(accumulate(map(len, stretches), initial=0))[:-1]
