"""A device error wherever the engine's thread goes on after other exceptions: the step raises `DeviceLost` at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.engine.core import forward
from slipstream.engine.errors import DeviceLost
from tests.unit.doubles import AsNetwork, Faulty
from tests.unit.toy import Toy, toy_engine, toy_slot

PROMPT = [1, 2, 3, 4]


LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def gone(*_: Any, **__: Any) -> Any:
    raise LOST


def play(toy: Toy, *types: str) -> None:
    """Serve one request to its end; what ends the engine is raised."""
    toy.engine.add(toy_slot("a", PROMPT, max_tokens=9, types=types))
    for _ in range(100):
        toy.engine.step()
        if not toy.engine.busy:
            return


def failing_pass(toy: Toy) -> None:
    toy.target.spoil = gone


def failing_on_the_second_try(toy: Toy) -> None:
    errors = iter([RuntimeError("a pass that may be tried again")])

    def spoil(*_: Any) -> None:
        for error in errors:
            raise error
        gone()

    toy.target.spoil = spoil


def failing_in_what_one_request_needs(toy: Toy) -> None:
    toy.engine._cache.publish = gone  # type: ignore[method-assign]


def failing_to_reserve(toy: Toy) -> None:
    toy.engine._cache.reserve = gone  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "plant",
    [failing_pass, failing_on_the_second_try, failing_in_what_one_request_needs, failing_to_reserve],
    ids=lambda one: one.__name__,
)
def test_a_step_ends_the_engine(plant: Callable[[Toy], None]) -> None:
    toy = toy_engine(n_slots=2)
    plant(toy)
    with pytest.raises(DeviceLost) as caught:
        play(toy)
    assert isinstance(caught.value.__cause__, torch.AcceleratorError)


@pytest.mark.parametrize("verb", ["begin", "draft", "accept", "end"])
def test_a_drafter_that_loses_the_device_ends_the_engine(verb: str) -> None:
    toy = toy_engine(lambda cache: [AsNetwork(Faulty(verb, LOST))], n_slots=1)
    with pytest.raises(DeviceLost):
        play(toy, "faulty")


def test_picks_that_do_not_arrive_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = toy_engine()
    monkeypatch.setattr(forward.Picks, "read", gone)
    with pytest.raises(DeviceLost):
        play(toy)


def test_a_pass_launched_behind_another_ends_the_engine() -> None:
    toy = toy_engine(n_slots=1, overlaps=True)
    engine: Any = toy.engine
    failed = []

    def has_room(_: Any) -> bool:
        failed.append(True)
        return gone()  # type: ignore[no-any-return]

    launch = engine._launch_behind

    def launch_behind(*arguments: Any) -> Any:
        engine.seats.has_room = has_room
        return launch(*arguments)

    engine._launch_behind = launch_behind
    with pytest.raises(DeviceLost):
        play(toy)
    assert failed == [True]
