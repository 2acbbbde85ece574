"""Replayed passes against the passes they were captured from: the same bits, the same drafts, for every size.

`tests.recording` stands for CUDA graphs: it does a captured pass's operations again, on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.batch import Batch
from slipstream.engine.frames import MOST_LOGITS, PROMPT_ROWS, ROWS, Frame, FrameSize, frame_sizes
from tests.oracle.lab import DEMO, Bench, Lab, play
from tests.oracle.lossless import HEADS, demo_cases, folders_of
from tests.oracle.ranks_lab import RanksLab
from tests.oracle.replays import compare_all_sizes, same_drafts
from tests.recording import ReadsValueError, record

ABOUT = ("engine/models/captured.py",)
pytestmark = pytest.mark.sampled(keep=4)


@pytest.fixture(scope="module", params=(torch.float32, torch.bfloat16), ids=str)
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(DEMO, request.param)


def test_every_captured_size_gives_the_bits_of_the_pass_itself(lab: Lab) -> None:
    assert compare_all_sizes(lab) == []


def test_every_captured_size_gives_the_bits_of_the_pass_itself_with_windows(tmp_path: Path) -> None:
    assert compare_all_sizes(Lab(folders_of("window", tmp_path), torch.bfloat16)) == []


@pytest.mark.parametrize("kind", ["paged", "window", "many-heads"])
def test_ranks_replay_together(kind: str, tmp_path: Path, *, is_whole: bool) -> None:
    """Gatherings are captured as well, and the first rank names the frame that all of them replay."""
    lab = RanksLab(folders_of(kind, tmp_path), torch.bfloat16, 2)
    if kind != "many-heads":  # whose states move with every pass
        assert compare_all_sizes(lab) == []
    n_accepted, same = same_drafts(lab, ("draft-model",), n_cases=3 if is_whole else 1)
    assert same
    assert n_accepted > 0
    lab.divided.close()


@pytest.mark.parametrize("lab", [torch.bfloat16], ids=str, indirect=True)
@pytest.mark.parametrize("name", ["draft-model", *HEADS])
def test_drafts_and_text_are_the_same(lab: Lab, name: str) -> None:
    """A value frozen in a draft network's capture would show in nothing but its acceptance."""
    n_accepted, same = same_drafts(lab, (name,))
    assert same
    assert n_accepted > 0


@pytest.mark.parametrize(
    ("kind", "name"), [("window", "draft-model"), ("hybrid", "draft-model"), ("hybrid", "draft-mtp")]
)
def test_drafts_and_text_are_the_same_with_other_caches(kind: str, name: str, tmp_path: Path) -> None:
    n_accepted, same = same_drafts(Lab(folders_of(kind, tmp_path), torch.bfloat16), (name,))
    assert same
    assert n_accepted > 0


@pytest.mark.parametrize("lab", [torch.float32], ids=str, indirect=True)
def test_a_value_frozen_in_a_capture_is_seen(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that a replay does not read anew change the text."""
    cases = [replace(one, max_tokens=24) for one in demo_cases(lab, "greedy", 4)]
    meant = play(lab, Bench(), cases).tokens
    bench = Bench(n_slots=2, captured=True)
    assert play(lab, bench, cases).tokens == meant
    fill = Frame.fill
    monkeypatch.setattr(Frame, "fill", lambda frame, batch: fill(frame, _without_past(batch)))
    assert play(lab, bench, cases).tokens != meant


def _without_past(batch: Batch) -> Batch:
    return replace(batch, n_past=torch.zeros_like(batch.n_past))


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1]),
    ],
)
def test_looking_at_a_value_or_sending_one_cannot_be_captured(look: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, dtype=torch.int64)

    def work() -> None:
        look(x + 1)

    with pytest.raises(ReadsValueError):
        record(work)


@pytest.mark.parametrize("n_slots", [1, 3, 4, 8, 64])
@pytest.mark.parametrize("n_drafts", [0, 1, 16, 64])
def test_every_pass_of_drafts_has_a_frame_that_is_not_much_larger(n_slots: int, n_drafts: int) -> None:
    sizes = frame_sizes(n_slots, n_drafts, 2048)
    assert [one.n_rows for one in sizes] == sorted((one.n_rows for one in sizes), reverse=True)
    assert len(sizes) == len(set(sizes)) <= 72
    for n_spans in range(1, n_slots + 1):
        for n_rows in range(
            n_spans, min(n_spans * (1 + n_drafts), ROWS[-1] if n_spans < n_slots else MOST_LOGITS) + 1
        ):
            fitting = [one.n_rows for one in sizes if _takes(one, (n_spans, n_rows, n_rows))]
            assert fitting, (n_spans, n_rows)
            assert min(fitting) <= 2 * max(n_rows, n_spans)


@pytest.mark.parametrize("n_slots", [1, 3, 16])
@pytest.mark.parametrize("n_drafts", [0, 16])
def test_every_pass_with_a_prompt_has_a_frame_that_is_not_much_larger(n_slots: int, n_drafts: int) -> None:
    """All slots but that of the prompt decode, with drafts of up to n_drafts tokens."""
    sizes = frame_sizes(n_slots, n_drafts, 2048)
    n_logits = min(1 + (n_slots - 1) * (1 + n_drafts), MOST_LOGITS)
    for n_rows in range(n_logits + 1, PROMPT_ROWS[-1] + 1):
        fitting = [one.n_rows for one in sizes if _takes(one, (n_slots, n_rows, n_logits))]
        assert min(fitting) <= max(32, n_rows + max(n_rows // 2, 15) if n_rows < 128 else n_rows + 127)
    # What all frames need at most is what the first needs.
    assert all(one.n_logits <= sizes[0].n_logits for one in sizes)


@pytest.mark.parametrize(("batch_size", "largest"), [(16, 24), (48, 48), (50, 64), (700, 768), (2048, 1024)])
def test_no_frame_is_larger_than_the_passes(batch_size: int, largest: int) -> None:
    assert max(one.n_rows for one in frame_sizes(1, 16, batch_size)) == largest


def _takes(size: FrameSize, needed: tuple[int, int, int]) -> bool:
    return all(one >= other for one, other in zip(size, needed, strict=True))
