"""How benchmarks count: replies that are recited, replies that loop, checkpoints that are written once."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.acceptance import before_loop
from demo.acceptance import passes as passes_of
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import Drafter, Guess, TextDrafter, Want
from tests.bench import drafting, models, passes
from tests.bench.models import Model, folders
from tests.bench.playing import Reply
from tests.bench.scene import NO_OVERLAP, Scene
from tests.bench.stage import Stage, Task, demo_tasks, random_tokens
from tests.gpu.lossless import launched_ahead
from tests.gpu.setting import Setting
from tests.gpu.tokens import goals
from tests.oracle.lab import DEMO, Lab
from tests.wound_clock import WoundClock

pytestmark = pytest.mark.sampled(keep=4, together=True)

N_MAX = 5
TICK_S = 0.2  # of an engine's clock: one pass of each width is enough to warm up
NETWORKS = ("draft-model", "draft-eagle3", "draft-mtp")
PROMPT, REPLY = random_tokens(40, 0, 4000), random_tokens(60, 1, 4000)


class Planned(TextDrafter):
    """Drafts a reply that is right but at some places."""

    name = "scripted"

    def __init__(self, guesses: Sequence[int]) -> None:
        self._guesses = guesses

    def guess(self, want: Want) -> Guess:
        return Guess(self._at(want.slot)[: want.n_max])

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
    stage = Stage(lab, ("scripted",), adaptive=False, now=WoundClock(TICK_S))
    reply = stage.play([Task("made up", PROMPT, REPLY)], ("scripted",), N_MAX).replies[0]
    assert tuple(reply.token_ids) == REPLY
    seconds, n_tokens, n_passes = reply.decoding(len(REPLY))
    assert seconds > 0
    # The first token comes with the prompt.
    right = [i not in wrong for i in range(1, len(REPLY))]
    assert (n_tokens, n_passes) == (len(REPLY) - 1, passes_of(right, N_MAX))


@pytest.fixture(scope="module")
def tasks(lab: PlannedLab) -> list[Task]:
    """With the target's own replies, which networks foretell."""
    return Stage(lab, now=WoundClock(TICK_S)).answered(demo_tasks(lab, "rename", 2, 40))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("types", [(), *((name,) for name in NETWORKS)])
def test_passes_that_overlap_say_the_same_and_keep_the_same_drafts(
    lab: PlannedLab, tasks: list[Task], types: tuple[str, ...], captured: bool
) -> None:
    clock = WoundClock(TICK_S)
    stage = Stage(lab, types, n_slots=2, adaptive=False, captured=captured, overlaps=False, now=clock)
    asked = [*tasks, *(replace(task, reply=(), max_tokens=task.n_tokens, may_end=True) for task in tasks)]

    def steps() -> list[list[int]]:
        """Tokens of each reply after each step, but where what is left of it may make a draft shorter."""
        replies = stage.play(asked, types, N_MAX).replies
        assert [tuple(one.token_ids) for one in replies] == [task.reply for task in tasks] * 2
        return [[n for _, n in one.arrivals if n < len(one.token_ids) - 2 * (1 + N_MAX)] for one in replies]

    with launched_ahead() as drafted:
        meant = steps()
        assert not drafted
        stage.overlaps = True
        assert steps() == meant
    assert len(drafted) > (10 if types else 60)
    assert any(drafted) == bool(types)
    assert any(one != [*range(1, 1 + len(one))] for one in meant) == bool(types)  # drafts were kept


def test_rows_come_from_passes_that_overlap_as_they_say(
    lab: PlannedLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[tuple[Sequence[str], bool, bool]] = Counter()
    play = Stage.play

    def watched(
        stage: Stage, tasks: Sequence[Task], types: Sequence[str] = (), *more: Any, **named: Any
    ) -> Any:
        with launched_ahead() as drafted:
            played = play(stage, tasks, types, *more, **named)
        if named:  # prompts are cached and replies are made without names
            seen[types, stage.overlaps, bool(drafted)] += 1
        return played

    monkeypatch.setattr(Stage, "play", watched)
    scene = Scene("demo", lab, Setting(lab.target.device, quick=True, deadline=math.inf))
    names = [one.name for one in passes.host(scene)]
    assert names == [f"step of {n} streams{way}" for n in (1, 2) for way in ("", NO_OVERLAP)]
    assert seen == {((), True, True): 2, ((), False, False): 2}
    told = {one.name: one.figures for one in drafting.concurrency(scene)}
    assert [*told] == [
        f"{n} streams, {name}{way}" for n in (1, 2) for name in ("plain", "auto") for way in ("", NO_OVERLAP)
    ]
    assert seen[(), True, True] == seen[(), False, False] == 4
    assert sorted(overlaps for types, overlaps, _ in seen.elements() if types) == [False, False, True, True]
    assert all(one["tokens a pass"] == 1 for name, one in told.items() if "plain" in name)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_nobody_else_hears_a_text_that_is_recited(lab: PlannedLab, captured: bool, overlaps: bool) -> None:
    free = replace(demo_tasks(lab, "continue", 1, 24)[0], may_end=True)
    clock = WoundClock(TICK_S)
    alone = Stage(lab, now=clock).play([free]).replies[0]
    stage = Stage(lab, n_slots=2, captured=captured, overlaps=overlaps, now=clock)
    recited = Task("made up", PROMPT, REPLY)
    for tasks in ([free, recited], [recited, free]):  # a slot's next request is not its last one
        meant = [task.reply or tuple(alone.token_ids) for task in tasks]
        assert [tuple(one.token_ids) for one in stage.play(tasks).replies] == meant
        assert stage.pass_s(100, 3, 2) > 0


def test_a_reply_that_is_not_the_recited_one_is_an_error(lab: PlannedLab) -> None:
    stage = Stage(lab, now=WoundClock(TICK_S))
    stage._voice.recite = lambda slot_id, text: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="not what was recited"):
        stage.play([Task("made up", PROMPT, REPLY)])


def test_fewer_streams_than_slots_run_at_once(lab: PlannedLab) -> None:
    stage, most = Stage(lab, n_slots=4, now=WoundClock(TICK_S)), []
    step = stage.engine.step

    def watched() -> Any:
        events = step()
        most.append(len(stage.engine.seats.running))
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
    assert len(written) == 2 + len(first.heads)
    assert set(DEMO.heads) - set(first.heads) == {"draft-dspark"}
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
    assert met("host", streams=1, overlaps="yes", host=0.04) == ["NO"]
    assert met("host", streams=64, overlaps="yes", host=0.04) == ["yes"]
    assert met("host", streams=1, overlaps="no", host=0.9) == []
    assert met("host", streams=2, overlaps="yes", host=0.9) == []
