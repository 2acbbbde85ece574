"""Images among tokens: positions, rows of a pass, what they see, keys of prefixes, and where chunks end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from slipstream.engine.batch import Batch, Span
from slipstream.engine.cache.pages import prefix_keys
from slipstream.engine.images import (
    Ahead,
    ImageFeatures,
    ImageLayout,
    ImageMark,
    PlacedImage,
    cut_before,
    positions_of,
)

CPU = torch.device("cpu")
PAD = 7


def image(
    start: int,
    n_rows: int,
    *,
    axes: Sequence[Sequence[int]] | None = None,
    ahead: Ahead = "nowhere",
    deep: int = 0,
) -> PlacedImage:
    """An image of n_rows tokens whose features count up from 100 * start."""
    laid = None if axes is None else np.array(axes, np.int64)
    n_positions = n_rows if laid is None else int(laid.max()) + 1
    layout = ImageLayout((PAD,) * n_rows, np.ones(n_rows, bool), laid, n_positions, ahead)
    rows = (100.0 * start + torch.arange(n_rows))[:, None].expand(-1, 2).clone()
    more = torch.stack([rows + k for k in range(1, deep + 1)]) if deep else None
    return PlacedImage(start, layout, bytes([start]) * 32, ImageFeatures(rows, more))


SQUARE = ((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1))  # 2 by 2


def batch_of(*spans: Span, begins: Sequence[int] = ()) -> Batch:
    table = list(range(20))
    return Batch.build(spans, [table] * len(spans), 4, CPU, begins=begins)


def span(start: int, end: int, images: Sequence[PlacedImage], slot: int = 0) -> Span:
    return Span(slot, [1] * (end - start), start, 0, 1, images)


def test_text_behind_an_image_stands_behind_its_positions() -> None:
    images = [image(2, 4, axes=SQUARE), image(9, 4, axes=SQUARE)]
    assert positions_of(images, 0, 2).tolist() == [0, 1]
    assert positions_of(images, 6, 9).tolist() == [4, 5, 6]
    assert positions_of(images, 13, 15).tolist() == [9, 10]


def test_rows_of_a_pass_are_those_of_the_images_within_it() -> None:
    images = [image(2, 4, axes=SQUARE, deep=2), image(9, 4, axes=SQUARE, deep=2)]
    batch = batch_of(span(0, 3, ()), span(4, 11, images, slot=1))
    found = batch.images
    assert found is not None
    assert found.index.tolist() == [3, 4, 8, 9]  # rows of the pass
    assert found.features[:, 0].tolist() == [202.0, 203.0, 900.0, 901.0]
    assert found.deep is not None
    assert found.deep[1, :, 0].tolist() == [204.0, 205.0, 902.0, 903.0]
    assert found.axes is not None
    assert found.axes.tolist() == [[2, 2, 7, 7], [3, 3, 7, 7], [2, 3, 7, 8]]
    assert batch.positions.tolist() == [0, 1, 2, 4, 5, 4, 5, 6, 7, 8]


def test_what_stands_between_the_rows_of_an_image_is_text() -> None:
    layout = ImageLayout((PAD, PAD, 8, PAD, PAD, 9), np.array([1, 1, 0, 1, 1, 0], bool), None, 6)
    rows = torch.arange(4.0)[:, None].expand(-1, 2)
    placed = PlacedImage(1, layout, b"k" * 32, ImageFeatures(rows))
    found = batch_of(span(2, 7, [placed])).images
    assert found is not None
    assert found.index.tolist() == [0, 2, 3]
    assert found.features[:, 0].tolist() == [1.0, 2.0, 3.0]


def test_a_pass_without_images_has_nothing_of_them() -> None:
    batch = batch_of(span(6, 9, [image(2, 4)]))
    assert batch.images is None
    assert batch.wholes is None
    assert not batch.has_images


@pytest.mark.parametrize(
    ("ahead", "in_all", "in_windows"),
    [("nowhere", False, False), ("everywhere", True, True), ("in windows", False, True)],
)
def test_rows_see_those_behind_them_where_they_should(ahead: Ahead, in_all: bool, in_windows: bool) -> None:
    batch = batch_of(span(0, 2, ()), span(1, 8, [image(2, 4, ahead=ahead)], slot=1))
    windowed = batch.on_pages([list(range(20))] * 2, 4)
    plain = [(0, 1), (1, 2), *((p, p + 1) for p in range(1, 8))]
    seeing = [*plain[:3], *((p, 6) for p in range(2, 6)), (6, 7), (7, 8)]
    for made, is_ahead in ((batch, in_all), (windowed, in_windows)):
        assert (None if made.wholes is None else made.wholes.tolist()) == (
            [list(one) for one in seeing] if is_ahead else None
        )


def test_places_are_counted_from_where_the_page_table_begins() -> None:
    batch = batch_of(span(6, 12, [image(8, 3, ahead="everywhere")]), begins=[4])
    assert batch.wholes is not None
    assert batch.wholes[2:5].tolist() == [[4, 7], [5, 7], [6, 7]]


def test_a_batch_is_the_same_made_of_its_parts() -> None:
    images = [image(2, 4, axes=SQUARE, ahead="everywhere", deep=1)]
    batch = batch_of(span(0, 8, images))
    made = Batch.of_parts(batch.parts)
    assert made.parts.keys() == batch.parts.keys()
    assert all(torch.equal(made.parts[name], one) for name, one in batch.parts.items())
    assert {"images.deep", "images.axes", "wholes"} <= set(made.parts)


def test_a_chunk_ends_before_an_image_that_is_not_to_be_cut_or_behind_it() -> None:
    images = [image(4, 6, ahead="in windows"), image(20, 3)]
    assert cut_before(images, 0, 7) == 4
    assert cut_before(images, 4, 7) == 10
    assert cut_before(images, 0, 4) == 4
    assert cut_before(images, 0, 10) == 10
    assert cut_before(images, 12, 21) == 21  # its rows see none behind them


def test_a_key_depends_on_the_images_that_begin_before_its_page_ends() -> None:
    tokens = [PAD] * 16
    plain = list(prefix_keys(tokens, 4, ""))
    one, other = (list(prefix_keys(tokens, 4, "", [ImageMark(6, 10, key)])) for key in (b"a" * 32, b"b" * 32))
    assert one[0] == other[0] == plain[0]
    assert all(a != b != p != a for a, b, p in zip(one[1:], other[1:], plain[1:], strict=True))
    assert list(prefix_keys(tokens, 4, "", [ImageMark(6, 10, b"a" * 32)], one[:2])) == one[2:]
    moved = list(prefix_keys(tokens, 4, "", [ImageMark(7, 11, b"a" * 32)]))
    assert moved[1] != one[1]
