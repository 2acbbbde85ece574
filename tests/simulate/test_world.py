"""The simulator itself: rates that can be worked out by hand, and static settings against the chain's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from slipstream.engine.speculate.drafter import Drafter
from tests.simulate.cells import Rate, halves, play, static
from tests.simulate.clock import Clock, Drift, Jump, Spell, Suspension, Trouble
from tests.simulate.machine import Machine, all_machines, read_machine
from tests.simulate.planner import Auto, fixed
from tests.simulate.workload import NETWORK, TEXT, Workload, all_workloads, read_workload
from tests.simulate.world import Scene, World

FLAT = Machine.of(
    {"pass": {"points": [[1, 1.0], [100, 1.0]]}, "network": {"position_s": 0.1}, "text": {"ask_s": 0.0}},
    "flat",
)


def workload(**luck: float) -> Workload:
    state = {"text": {"found": 0.0}, "network": luck}
    return Workload({"request": [{"prompt": [4, 4], "reply": [400, 400], "state": [state]}]}, "w")


@pytest.mark.sampled
@pytest.mark.parametrize("right", [0.0, 0.5, 0.8])
def test_a_networks_rate_is_the_formula(right: float) -> None:
    """(1 - a^(k+1)) / (1 - a) tokens a pass."""
    found = Rate.of([halves(World(Scene(FLAT, workload(right=right), 4), static((NETWORK,), 3)), 40_000)])
    tokens = sum(right**i for i in range(4))
    assert found.whole == pytest.approx(4 * tokens / 1.3, rel=0.03)


def test_plain_decoding_makes_a_token_a_pass() -> None:
    totals = World(Scene(FLAT, workload(), 8), static((), 0)).play(n_passes=100)
    assert (totals.n_tokens, totals.n_drafted) == (800, 0)
    assert totals.seconds == pytest.approx(100.0)


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("types", [(TEXT,), (NETWORK,), (TEXT, NETWORK)])
@pytest.mark.parametrize("n_slots", [1, 6])
def test_a_static_setting_is_the_chain_without_adaptation(types: Sequence[str], n_slots: int) -> None:
    machine, copying = (
        read_machine(all_machines()["slow-width"]),
        read_workload(all_workloads()["long-prompts"]),
    )
    scene = Scene(machine, copying, n_slots, seed=3)

    def chain(drafters: Sequence[Drafter], clock: Clock) -> Auto:
        return fixed([one for one in drafters if one.name in types], clock, 5)

    ours = World(scene, static(types, 5)).play(n_passes=400)
    assert ours.n_accepted > 100
    assert World(scene, chain).play(n_passes=400) == ours


def test_what_a_search_has_found_is_rated_under_other_noises() -> None:
    noisy = replace(FLAT, trouble=Trouble(noise=0.5))

    def plain(*noises: int) -> Rate:
        scenes = [Scene(noisy, workload(), 2, noise=noise) for noise in noises]
        return Rate.of([halves(World(one, static((), 0)), 200) for one in scenes])

    once, again = (play(noisy, workload(), 2, n_passes=100, n_replays=n) for n in (0, 2))
    assert (once.n_passes, again.n_passes) == (100, 200)
    assert once.static.plain == plain(0)
    assert again.static.plain == plain(1, 2) != once.static.plain


def test_every_file_is_read_and_played() -> None:
    for path in all_machines().values():
        for one in all_workloads().values():
            world = World(Scene(read_machine(path), read_workload(one), 2), Auto)
            assert world.play(n_passes=5).n_tokens >= 10


def test_what_a_key_misspells_is_refused() -> None:
    with pytest.raises(TypeError):
        Machine.of({"pass": {"points": [[1, 1.0]], "contxt_s": 1.0}, "network": {"position_s": 0.1}}, "m")
    with pytest.raises(TypeError):
        Machine.of({"pass": {"points": [[1, 1.0]]}, "network": {"position_s": 0.1}, "spel": []}, "m")
    with pytest.raises(TypeError):
        workload(rigt=1.0)


def test_a_clock_is_disturbed_as_its_file_says() -> None:
    trouble = Trouble(
        spells=[Spell(start_s=10.0, length_s=2.0, factor=3.0, every_s=10.0, count=2, widths=(2, 4))],
        drifts=[Drift(start_s=50.0, factor=2.0, length_s=10.0), Drift(start_s=80.0, factor=2.0)],
        suspensions=[Suspension(start_s=70.2, length_s=5.0)],
        jumps=[Jump(start_s=90.2, seems_s=1e-9)],
    )
    clock = Clock(trouble, 0)
    found = {}
    for at, n_rows in ((0, 3), (10, 3), (11, 1), (20, 4), (30, 3), (55, 1), (70, 1), (81, 1), (90, 1)):
        clock.real_s = float(at)
        found[at] = clock.spend(1.0, n_rows)
    assert found == {0: 1.0, 10: 3.0, 11: 1.0, 20: 3.0, 30: 1.0, 55: 1.5, 70: 7.0, 81: 4.0, 90: 1e-9}
    assert clock.stopped_s == 5.0
    assert clock.now() == pytest.approx(clock.real_s - 4.0)
