"""How benchmarks count: replies that are recited, replies that loop, checkpoints that are written once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.acceptance import before_loop, passes
from engine.slot import Slot
from engine.speculate.drafter import Drafter, Guess, Want
from tests.bench import models
from tests.bench.models import Model, folders
from tests.bench.playing import Reply
from tests.bench.stage import Stage, Task, demo_tasks, random_tokens
from tests.gpu.tokens import goals
from tests.oracle.lab import DEMO, Lab

N_MAX = 5
PROMPT, REPLY = random_tokens(40, 0, 4000), random_tokens(60, 1, 4000)


class Planned(Drafter):
    """Drafts a reply that is right but at some places."""

    name = "scripted"

    def __init__(self, guesses: Sequence[int]) -> None:
        self._guesses = guesses

    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        return [Guess(self._at(want.slot)[: want.n_max]) for want in wants]

    def _at(self, slot: Slot) -> Sequence[int]:
        return self._guesses[len(slot.tokens) - slot.n_prompt :]


class PlannedLab(Lab):
    """The demo, with that drafter for the scripted one."""

    guesses: Sequence[int] = ()

    def _drafter(self, name: str, *more: Any) -> Drafter:
        return Planned(self.guesses) if name == "scripted" else super()._drafter(name, *more)


@pytest.fixture(scope="module")
def lab() -> PlannedLab:
    torch.set_num_threads(1)
    return PlannedLab(DEMO, torch.float32)


@pytest.mark.parametrize("wrong", [(), (1,), (0, 7, 8, 30, 59), tuple(range(60))])
def test_a_recited_reply_takes_the_passes_that_its_right_guesses_leave(
    lab: PlannedLab, wrong: tuple[int, ...]
) -> None:
    lab.guesses = [token_id + (i in wrong) for i, token_id in enumerate(REPLY)]
    stage = Stage(lab, ("scripted",), adaptive=False)
    reply = stage.play([Task("made up", PROMPT, REPLY)], ("scripted",), N_MAX).replies[0]
    assert tuple(reply.token_ids) == REPLY
    seconds, n_tokens, n_passes = reply.decoding(len(REPLY))
    assert seconds > 0
    # The first token comes with the prompt.
    right = [i not in wrong for i in range(1, len(REPLY))]
    assert (n_tokens, n_passes) == (len(REPLY) - 1, passes(right, N_MAX))


@pytest.mark.parametrize("captured", [False, True])
def test_nobody_else_hears_a_text_that_is_recited(lab: PlannedLab, captured: bool) -> None:
    free = replace(demo_tasks(lab, "continue", 1, 24)[0], may_end=True)
    alone = Stage(lab).play([free]).replies[0]
    stage = Stage(lab, n_slots=2, captured=captured)
    beside, recited = stage.play([free, Task("made up", PROMPT, REPLY)]).replies
    assert stage.pass_s(100, 3, 2) > 0
    assert beside.token_ids == alone.token_ids
    assert tuple(recited.token_ids) == REPLY


def test_a_reply_that_is_not_the_recited_one_is_an_error(lab: PlannedLab) -> None:
    stage = Stage(lab)
    stage._voice._next = lambda span: [None] * span.n_logits  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="not what was recited"):
        stage.play([Task("made up", PROMPT, REPLY)])


def test_fewer_streams_than_slots_run_at_once(lab: PlannedLab) -> None:
    stage, most = Stage(lab, n_slots=4), []
    step = stage.engine.step

    def watched() -> Any:
        events = step()
        most.append(len(stage.engine._running))
        return events

    stage.engine.step = watched  # type: ignore[method-assign]
    played = stage.play([Task("made up", PROMPT, REPLY[:8])] * 5, at_once=2)
    assert len(played.replies) == 5
    assert max(most) == 2


def test_a_reply_counts_up_to_its_loop() -> None:
    dice = random.Random(3)
    made_up = [[dice.randrange(2) for _ in range(200)] for _ in range(20)]
    made_up += [list(range(30)) + [1, 2, 3, 4, 5, 6, 7, 8, 9] * 4, list(range(100)), []]
    counted = [Reply(token_ids=one).n_counted for one in made_up]
    assert counted == [before_loop(one) for one in made_up]
    assert counted[-3:] == [30 + 9 + 8, 100, 0] or counted[-3] < 30 + 4 * 9


def test_checkpoints_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Model(DEMO, {"layers": 6}, {"layers": 3})
    monkeypatch.setattr(models, "MODELS", {"tiny": tiny})
    first = folders("tiny", tmp_path)
    assert first.draft is not None
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert len(written) == 2 + len(DEMO.heads)
    assert folders("tiny", tmp_path) == first
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    # What an earlier process left unfinished is no checkpoint.
    first.draft.rename(first.draft.with_suffix(".part"))
    (first.draft.with_suffix(".part") / "model.safetensors").write_bytes(b"half")
    again = folders("tiny", tmp_path)
    assert again == first
    assert (first.draft / "model.safetensors").stat().st_size > 1000
    monkeypatch.setattr(models, "MODELS", {"tiny": replace(tiny, target={"layers": 7})})
    assert folders("tiny", tmp_path).target != first.target


def test_models_without_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8B: is built in"):
        folders("8B", tmp_path)


def test_goals_of_the_device() -> None:
    def met(case: str, **figures: Any) -> list[str]:
        return [one.figures["met"] for one in goals(case, figures)]

    assert met("width", context=2048, rows=8, **{"x one row": 1.05}) == ["yes"]
    assert met("width", context=2048, rows=8, **{"x one row": 1.06}) == ["NO"]
    assert met("width", context=2048, rows=32, **{"x one row": 1.24}) == ["yes"]
    assert met("width", context=512, rows=8, **{"x one row": 3.0}) == []
    assert met("host", streams=1, host=0.04) == ["NO"]
    assert met("host", streams=64, host=0.04) == ["yes"]
    assert met("host", streams=2, host=0.9) == []
