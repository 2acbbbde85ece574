"""Frames of a CPU's passes: exactly a batch's shape, made as it comes; and frames that there is no room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.engine import frames
from slipstream.engine.batch import Batch, Span
from slipstream.engine.frames import ExactFrames, Frame, Frames, Room, frame_sizes, wanted
from slipstream.engine.models.captured import CapturedPass, cuda_affords
from tests.recording import record

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


def test_a_shape_that_decodes_has_a_frame_from_its_first_batch_on() -> None:
    own = ExactFrames(ROOM, CPU)
    assert own.unmade(range(1, 4)) == [1, 2, 3]
    first = placed(own, (2, 5, 2)).frame
    assert isinstance(first, Frame)
    assert first.is_new
    assert placed(own, (2, 9, 2), first=20).frame is first
    assert not first.is_new
    assert placed(own, (2, 5, 2), (1, 3, 1)).frame not in (None, first)
    assert own.unmade((*range(1, 4), frames.MOST_EXACT_ROWS + 1)) == [1, 3]


def test_a_shape_with_a_prompt_has_a_frame_from_its_second_batch_on() -> None:
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


def test_what_is_too_large_runs_by_itself() -> None:
    own = ExactFrames(ROOM, CPU)
    for _ in range(3):
        assert placed(own, (frames.MOST_EXACT_ROWS + 1, 0, 1)).frame is None  # rows
        assert placed(own, (1, PAGE * ROOM.n_pages, 1)).frame is None  # pages


def test_the_frames_that_are_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shapes have come once; and what was captured over the others is gone."""
    monkeypatch.setattr(frames, "MOST_EXACT", 3)
    own = ExactFrames(ROOM, CPU)
    for n in range(4, 15):
        assert placed(own, (n, 0, 1)).frame is None
    assert placed(own, (4, 0, 1)).frame is None  # it came long ago
    kept = placed(own, (1, 3, 1)).frame
    unused = placed(own, (2, 3, 2)).frame
    for one in (kept, unused):
        assert isinstance(one, Frame)
        one.captured["a pass"] = "its replay"
    for n in range(3, 9):
        placed(own, (n, 3, n))
        assert placed(own, (1, n, 1)).frame is kept
    assert placed(own, (2, 3, 2)).frame is not unused
    assert (kept.captured, unused.captured) == ({"a pass": "its replay"}, {})
    assert len(own._by_shape) == 3


def test_prompts_that_take_too_much_memory_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    """Others are, whatever they take, and what is dropped runs by itself."""
    sizes = frame_sizes(1, 16, 96)
    frames = Frames([Frame(one, replace(ROOM, n_pages=20), CPU) for one in sizes])
    asked: list[int] = []

    def run(batch: Batch, _: Sequence[Tensor]) -> list[Tensor]:
        asked.append(len(batch.token_ids))
        return [batch.token_ids[batch.logit_index] + 1]

    def affords(work: Callable[[], None]) -> bool:
        work()
        return asked[-1] <= 48

    captured = CapturedPass(run, frames, record, (), affords)
    assert [one.size for one in frames.frames] == sorted(
        (one for one in sizes if one.n_rows <= 48), key=lambda one: one.n_rows
    )
    assert "passes of 64, 96 rows take too much memory" in caplog.text
    assert frames.place(batch((50, 0, 1)), CPU).frame is None
    for n_rows, n_logits in ((40, 3), (5, 2)):
        found = frames.place(batch((n_rows, 1, n_logits), first=7), CPU)
        assert isinstance(found.frame, Frame)
        (tokens,) = captured(found)
        assert wanted(found, tokens).tolist() == [8 + n_rows - n_logits + i for i in range(n_logits)]


@pytest.mark.parametrize(("most", "fits"), [(400, True), (401, False), (None, False)])
def test_a_captured_pass_takes_a_quarter_of_the_free_memory_at_most(
    most: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 bytes of the device are free; torch has taken 300 and uses 100. most: in use at a time; None: too many."""

    def work() -> None:
        if most is None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda on: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda on: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda on: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda on: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda on: most)
    assert cuda_affords(device, work) is fits
