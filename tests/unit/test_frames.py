"""Frames of a CPU's passes: exactly a batch's shape, made when it comes again."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine import frames
from slipstream.engine.batch import Batch, Span
from slipstream.engine.frames import ExactFrames, Frame, Room, wanted

CPU, PAGE = torch.device("cpu"), 4
ROOM = Room(n_pages=6, spare_page=60)


def batch(*spans: tuple[int, int, int], first: int = 0) -> Batch:
    """spans: tokens, tokens before them, logits; token ids count from `first`."""
    given = [
        Span(i, range(first, first + n), n_past, 0, n_logits) for i, (n, n_past, n_logits) in enumerate(spans)
    ]
    tables = [[10 * i + k for k in range(-(-one.end // PAGE))] for i, one in enumerate(given)]
    return Batch.build(given, tables, PAGE, CPU)


def placed(own: ExactFrames, *spans: tuple[int, int, int], first: int = 0) -> Batch:
    return own.place(batch(*spans, first=first), CPU)


def test_a_shape_has_a_frame_from_its_second_batch_on() -> None:
    own = ExactFrames(ROOM, CPU)
    assert placed(own, (3, 5, 1)).frame is None
    assert placed(own, (4, 5, 1)).frame is None
    assert placed(own, (3, 5, 2)).frame is None
    first = placed(own, (3, 9, 1)).frame
    assert isinstance(first, Frame)
    assert placed(own, (3, 0, 1)).frame is first
    assert placed(own, (4, 1, 1)).frame not in (None, first)


@pytest.mark.parametrize("spans", [((1, 7, 1),), ((5, 3, 1), (2, 20, 2)), ((5, 0, 0), (1, 4, 1), (3, 17, 3))])
def test_a_frame_holds_the_batch_and_nothing_else(spans: tuple[tuple[int, int, int], ...]) -> None:
    own = ExactFrames(ROOM, CPU)
    placed(own, *[(n, 21 - n, n_logits) for n, _, n_logits in spans])
    placed(own, *[(n, 22 - n, n_logits) for n, _, n_logits in spans], first=50)  # whose traces are to go
    found, meant = placed(own, *spans, first=9), batch(*spans, first=9)
    assert isinstance(found.frame, Frame)
    assert found.spans == meant.spans
    for name, one in meant.parts.items():
        if name == "page_table":
            n_pages = one.shape[1]
            assert torch.equal(found.page_table[:, :n_pages], one)
            assert not found.page_table[:, n_pages:].any()
        else:
            assert torch.equal(found.parts[name], one), name
    logits = torch.arange(len(meant.logit_index))
    assert wanted(found, logits) is logits


def test_what_is_too_large_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ExactFrames(ROOM, CPU)
    for _ in range(3):
        assert placed(own, (frames.MOST_EXACT_ROWS + 1, 0, 1)).frame is None  # rows
        assert placed(own, (1, PAGE * ROOM.n_pages, 1)).frame is None  # pages
    monkeypatch.setattr(frames, "MOST_EXACT", 2)
    found = [placed(own, (2, 0, 1)).frame for _ in range(2)]  # the second shape, for which there is room
    assert found[0] is None
    assert found[1] is not None
    for _ in range(3):
        assert placed(own, (3, 0, 1)).frame is None
