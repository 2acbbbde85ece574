"""What goes between replicas and ingresses, unchanged; and the counts of several engines as those of one."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from slipstream.engine import errors
from slipstream.engine.api import (
    Delta,
    Done,
    Echo,
    Event,
    Failed,
    Progress,
    Speculation,
    Timings,
    TokenLogprob,
    Usage,
)
from slipstream.engine.drafting import Step
from slipstream.engine.errors import EngineError
from slipstream.engine.stats import DrafterCount, EngineStats, SlotState
from slipstream.server.cluster.merged_stats import merged
from slipstream.server.cluster.run_frames import FRAMES, Frame, error_of, frame_of, problem_of
from slipstream.server.report.meter import Meter
from slipstream.server.report.metrics import Scrape
from tests.http.fake import INFO

COUNT = DrafterCount(1, 2, 3, 4, (1, 2), (1,), 1, 1, 1, 0.5, 0.25, 0.125)
ENTRY = TokenLogprob(1, b"\xff\x00", -1.5, (TokenLogprob(2, b"a", -2.0),), 3)
EVENTS: list[Event] = [
    Echo((1, 2), ("a", "\x00é"), (None, ENTRY)),
    Progress(9, 3, 6, 0.25, 1),
    Delta(
        "é\ud83d\ude00"[:1],
        (7,),
        (None,),
        ("é",),
        (ENTRY,),
        (Step(0, "suffix", (1,), ("x",), 1, "no_guess"),),
    ),
    Done(
        "stop",
        "end",
        Usage(1, 2, 3),
        Timings(1, 2, 3, 4, 5),
        Speculation(("suffix",), 4, 0, 0.1, 9, (1, 2), {"suffix": COUNT}, synthetic=True),
        2**64 - 1,
        stop_token=4,
        slot=2,
    ),
    Failed(errors.InvalidRequest("seed", "is bad")),
]


def across(frame: Frame) -> Frame:
    (found,) = FRAMES.validate_json(FRAMES.dump_json([frame], exclude_defaults=True))
    assert found == frame
    return found


@pytest.mark.parametrize("event", EVENTS, ids=lambda one: type(one).__name__)
def test_an_event_crosses_unchanged(event: Event) -> None:
    found = across(frame_of("run", event)).event
    if isinstance(event, Failed):
        assert isinstance(found, Failed)
        assert (type(found.error), str(found.error)) == (type(event.error), str(event.error))
    else:
        assert found == event
        assert type(found) is type(event)


def test_every_kind_of_event_is_tried() -> None:
    assert {type(one) for one in EVENTS} == set(get_args(Event))


@pytest.mark.parametrize(
    "error",
    [
        errors.Overloaded("full", 1.5),
        errors.ContextTooLong(5, 3),
        errors.TextTooLong("prompt", 1, 2, 3, "--ctx-size"),
        errors.SlotFileRefused("damaged"),
        errors.Unsupported("tools", "not here"),
        errors.TimedOut(3),
        errors.StepFailed("a pass failed"),
        errors.DeviceLost(),
        errors.RankLost("killed"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_an_error_keeps_its_class_its_words_and_what_it_holds(error: EngineError) -> None:
    found = error_of(problem_of(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_infinite_numbers_cross_too() -> None:
    entry = TokenLogprob(1, b"", -math.inf)
    found = across(frame_of("run", Delta("", (1,), (None,), ("",), (entry,)))).event
    assert isinstance(found, Delta)
    assert found.logprobs[0].logprob == -math.inf


def stats(n: int, *names: str) -> EngineStats:
    return EngineStats(
        slots=(SlotState(0, True, f"request-{n}", 1, 2, 3, 4, 5),),
        n_waiting=n,
        n_pages_free=n,
        n_pages_cached=n,
        n_pages_held=n,
        n_steps=n,
        n_prompt_tokens=n,
        n_completion_tokens=n,
        drafters=dict.fromkeys(names, COUNT),
        n_preempted=n,
        disabled_drafters=names[:1],
        doubtful_drafters=names[1:],
        step_s={"forward": float(n)},
        step_average_s={"forward": float(n)},
    )


def test_counts_of_replicas_are_added_and_slots_numbered_through() -> None:
    parts = {"a": stats(1, "suffix", "draft-model"), "b": stats(3, "suffix")}
    found = merged(parts)
    assert found.replicas == parts
    assert [(one.id, one.request_id) for one in found.slots] == [(0, "request-1"), (1, "request-3")]
    assert (found.n_waiting, found.n_pages_held, found.n_completion_tokens, found.n_preempted) == (4, 4, 4, 4)
    assert found.drafters["draft-model"] == COUNT
    assert found.drafters["suffix"] == DrafterCount(2, 4, 6, 8, (2, 4), (2,), 2, 2, 2, 1.0, 0.5, 0.25)
    assert (found.disabled_drafters, found.doubtful_drafters) == (("suffix",), ("draft-model",))
    assert (found.step_s["forward"], found.step_average_s["forward"]) == (4.0, 2.0)


def test_counts_by_place_may_be_of_different_lengths() -> None:
    short, long = DrafterCount(accepted_by_position=(1,)), DrafterCount(accepted_by_position=(1, 5))
    parts = {name: stats(0) for name in "ab"}
    counted = {
        name: EngineStats(**{**{f: getattr(one, f) for f in one.__slots__}, "drafters": {"suffix": count}})
        for (name, one), count in zip(parts.items(), (short, long), strict=True)
    }
    assert merged(counted).drafters["suffix"].accepted_by_position == (2, 5)


def test_no_replica_is_an_engine_that_does_nothing() -> None:
    assert merged({}) == EngineStats((), 0, 0, 0, 0, 0, 0, 0, {}, 0, ())


def test_a_replicas_state_crosses() -> None:
    assert across(Frame(stats=stats(2, "suffix"))).stats == stats(2, "suffix")


def test_metrics_have_a_label_for_each_replica() -> None:
    found = {
        one.name: one
        for one in Scrape(merged({"a": stats(1, "suffix"), "b": stats(3)}), INFO, Meter()).collect()
    }
    running = found["slipstream:num_requests_waiting"].samples
    assert [(one.labels, one.value) for one in running] == [({"replica": "a"}, 1), ({"replica": "b"}, 3)]
    drafted = found["slipstream:spec_decode_num_draft_tokens"].samples
    assert [(one.labels, one.value) for one in drafted] == [({"drafter": "suffix", "replica": "a"}, 3)]
    assert found["slipstream:build_info"].samples[0].labels.keys().isdisjoint({"replica"})


def test_metrics_of_one_engine_have_none() -> None:
    for family in Scrape(stats(1, "suffix"), INFO, Meter()).collect():
        assert all("replica" not in sample.labels for sample in family.samples)
