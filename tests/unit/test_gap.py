"""Whether looking at a pass before the next is launched pays: tokens brought in against the device's wait."""

from __future__ import annotations

from engine.speculate.gap import Gap

TOKEN_S = 0.01


def looked(gap: Gap, slot_id: int, *n_accepted: int) -> None:
    """Passes that were looked for, and what they kept of drafters that read text."""
    for n in n_accepted:
        gap.ask([slot_id])
        gap.gain(slot_id, n)


def fresh(*, adaptive: bool = False) -> Gap:
    """One where nothing is what is usual."""
    gap = Gap(adaptive=adaptive)
    looked(gap, 99, *[0] * 500)
    return gap


def test_one_looks_until_that_has_brought_in_nothing_for_long() -> None:
    gap = Gap(adaptive=False)
    n_looks = 0
    while gap.pays([0], TOKEN_S):
        looked(gap, 0, 0)
        n_looks += 1
        assert n_looks < 100
    assert n_looks > 20
    assert gap.pays([1], TOKEN_S)  # one silent text does not speak for the next
    assert not fresh().pays([0], TOKEN_S)


def test_nobody_to_look_for_pays_nothing() -> None:
    assert not Gap(adaptive=False).pays([], TOKEN_S)


def test_what_is_brought_in_is_weighed_against_the_gap() -> None:
    gap = fresh(adaptive=True)
    for _ in range(40):
        gap.observe(0.002)
    looked(gap, 0, *[0, 0, 0, 0, 0, 1] * 30)  # less than a fifth of a token a pass, or 2 ms
    looked(gap, 0, 0, 0, 0)
    assert not gap.pays([0], TOKEN_S)
    assert gap.pays([0], 10 * TOKEN_S)
    assert gap.pays([0, 0], TOKEN_S)  # two such slots run together
    looked(gap, 1, *[0, 1] * 30)
    assert gap.pays([1], TOKEN_S)
    for _ in range(100):
        gap.observe(0.02)
    assert not gap.pays([1], TOKEN_S)


def test_a_slot_that_stops_copying_is_looked_at_no_longer() -> None:
    gap = fresh()
    looked(gap, 0, 8, 8, 8)
    looked(gap, 0, *[0] * 20)
    assert gap.pays([0], TOKEN_S)
    looked(gap, 0, *[0] * 60)
    assert not gap.pays([0], TOKEN_S)


def test_passes_that_were_not_looked_for_say_nothing() -> None:
    """Drafters that read text had no say in them."""
    gap = fresh()
    looked(gap, 0, 8)
    for _ in range(200):
        gap.gain(0, 0)
    assert gap.pays([0], TOKEN_S)


def test_another_text_begins_with_what_is_usual() -> None:
    gap = fresh()
    looked(gap, 0, 8)
    gap.ask([0])
    gap.begin(0)
    gap.gain(0, 8)  # of the text before
    looked(gap, 1, *[0] * 80)
    assert not gap.pays([1], TOKEN_S)
    assert gap.pays([0], TOKEN_S)  # 8 tokens once are not forgotten by all at once
    looked(gap, 1, *[0] * 200)
    assert not gap.pays([0], TOKEN_S)
