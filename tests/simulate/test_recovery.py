"""What is left of a disturbance once it is over: the planner is to be as fast as one that never met it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.clock import Jump, Spell, Suspension, Trouble
from tests.simulate.machine import Machine, all_machines, read_machine
from tests.simulate.planner import Auto, fixed
from tests.simulate.workload import NETWORK, Workload, all_workloads, read_workload
from tests.simulate.world import Scene, World

ABOUT = ("engine/speculate/decide/*.py", "engine/speculate/chain.py")
_LEARNT = 500  # passes before a disturbance
_SOON = 200  # passes after it, by which it is to be over
_LATER = 10_000
_WINDOW = 3000  # tokens over which a rate is taken

QUIET = Trouble(noise=0.03)
TROUBLES = {
    "slow spell": Trouble(noise=0.03, spells=[Spell(start_s=0.0, length_s=60.0, factor=4.0, sigma=0.6)]),
    "suspensions": Trouble(
        noise=0.03, suspensions=[Suspension(start_s=0.0, length_s=3.0, every_s=3.1, count=20)]
    ),
    "slow width": Trouble(noise=0.03, spells=[Spell(start_s=0.0, length_s=2.0, factor=10.0, widths=(5, 8))]),
    "clock to 1e-9 s": Trouble(noise=0.03, jumps=[Jump(start_s=0.0, seems_s=1e-9)]),
    "clock to 1000 s": Trouble(noise=0.03, jumps=[Jump(start_s=0.0, seems_s=1000.0)]),
}
ENDS = {
    "slow spell": 60.0,
    "suspensions": 62.0,
    "slow width": 2.0,
    "clock to 1e-9 s": 0.0,
    "clock to 1000 s": 0.0,
}


def requests(right: float) -> Workload:
    """A network that is as good everywhere, and little to copy."""
    state = {"text": {"found": 0.1, "right": 0.1, "longest": 4}, "network": {"right": right}}
    return Workload({"request": [{"prompt": [20, 40], "reply": [300, 500], "state": [state]}]}, "steady")


@cache
def scene(machine: str, right: float = 0.8) -> Scene:
    return Scene(read_machine(all_machines()[machine]), requests(right), 1)


def quiet_world(machine: str, right: float = 0.8, start: Sequence[tuple[int, int]] = ()) -> World:
    """A planner that has been warmed up on a quiet machine. start: as for `World`."""
    world = World(scene(machine, right), Auto, start)
    world.clock.disturb(QUIET)
    return world


def against_a_fresh_one(world: World, machine: str) -> float:
    """Tokens per second against a planner that starts here, both over the same text, after some passes of learning."""
    fresh = quiet_world(machine, start=world.places)
    rates = []
    for one in (world, fresh):
        one.play(n_passes=_SOON)
        played = one.play(n_tokens=one.totals.n_tokens + _WINDOW)
        rates.append(played.n_tokens / played.seconds)
    return rates[0] / rates[1]


@pytest.mark.sampled(keep=0, together=True)
@pytest.mark.parametrize("machine", ["laptop-8b", "h100-8b"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_disturbance_leaves_nothing_behind(machine: str, trouble: str, *, is_whole: bool) -> None:
    world = quiet_world(machine)
    world.play(n_passes=_LEARNT)
    world.clock.disturb(TROUBLES[trouble])
    end_s = world.clock.real_s + ENDS[trouble]
    world.play(n_passes=1)
    while world.clock.real_s < end_s:
        world.play(n_passes=1)
    world.clock.disturb(QUIET)
    soon = against_a_fresh_one(world, machine)
    world.play(n_passes=_LATER if is_whole else _LATER // 5)
    later = against_a_fresh_one(world, machine)
    assert min(soon, later) >= 0.95, f"{soon:.3f} soon, {later:.3f} later"


TIMES = st.floats(math.log(0.1), math.log(1e4)).map(math.exp)
HISTORIES = st.lists(st.tuples(st.integers(1, 160), TIMES, st.integers(1, 30)), max_size=40)


@pytest.mark.sampled(keep=0)
@settings(derandomize=True, max_examples=60, deadline=None, database=None)
@given(machine=st.sampled_from(["laptop-04b", "laptop-8b", "h100-8b", "tiny-demo"]), history=HISTORIES)
def test_whatever_passes_have_cost_it_drafts_again(
    machine: str, history: Sequence[tuple[int, float, int]]
) -> None:
    """history: rows, how many times too long, and how often in a row. Drafts pay several times over here."""
    world = quiet_world(machine, right=0.95)
    for n_rows, times, n_times in history:
        for _ in range(n_times):
            world.planner.measured(n_rows, times * scene(machine).machine.pass_s(n_rows, 0, 0))
    world.play(n_passes=_SOON)
    played = world.play(n_passes=50)
    assert played.n_drafted >= played.n_passes, f"{played.n_drafted} tokens drafted in 50 passes"


@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("right", [0.3, 0.6])
def test_where_a_row_costs_more_than_a_pass_plain_decoding_is_found(right: float, n_slots: int) -> None:
    """No first measurement but the narrowest is believed there, and once drafts are verified nothing shows the loss."""
    table = {
        "pass": {"points": [[1, 0.6e-3], [128, 81e-3]]},
        "network": {"position_s": 0.05e-3, "row_s": 1e-5},
    }
    machine = Machine.of(table, "dear rows")
    dear = Scene(machine, requests(right), n_slots)
    world = World(dear, Auto)
    world.play(n_passes=500)
    plain = World(dear, lambda drafters, clock: fixed([], clock, 0), world.places)
    played = [one.play(n_tokens=one.totals.n_tokens + _WINDOW) for one in (world, plain)]
    rates = [one.n_tokens / one.seconds for one in played]
    assert rates[0] >= 0.95 * rates[1], f"{rates[0] / rates[1]:.3f}"


def test_short_requests_that_were_all_wrong_do_not_end_drafting() -> None:
    """The network is never right in the first 24 requests of 32 tokens, none of which can pay for a trial alone."""
    machine, workload = (read_machine(all_machines()["h100-8b"]), read_workload(all_workloads()["apart"]))
    right = [sum(workload.script(0, i).told[NETWORK].right) > 32 for i in range(40)]
    assert right == [False] * 24 + [True] * 16
    played = World(Scene(machine, workload, 4), Auto).play(n_tokens=40 * 32)
    assert played.n_accepted > 0.2 * 16 * 32, f"{played.n_accepted} accepted in {played.n_passes} passes"
