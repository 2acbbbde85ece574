"""Which slot a request gets, and so which conversations can still be saved."""

from __future__ import annotations

from tests.unit.toy import Toy, toy_engine, toy_slot

TALK, OTHER, THIRD = [1, 2, 3, 4, 5], [6, 7, 8, 9], [9, 8, 7, 6]


def ask(toy: Toy, prompt: list[int], tenant: str = "") -> tuple[int, list[int]]:
    """Play a request alone: (the slot it got, its whole text)."""
    slot = toy_slot("a", prompt, tenant=tenant)
    toy.engine.add(slot)
    while toy.engine.busy:
        toy.engine.step()
    return slot.id, list(slot.tokens)


def test_other_conversations_get_other_slots_and_the_oldest_goes_first() -> None:
    toy = toy_engine(n_slots=3)
    assert [ask(toy, prompt)[0] for prompt in (TALK, OTHER, THIRD)] == [0, 1, 2]
    assert [ask(toy, [7, n])[0] for n in range(4)] == [0, 1, 2, 0]


def test_a_conversation_that_goes_on_stays_in_its_slot() -> None:
    toy = toy_engine(n_slots=3)
    assert ask(toy, TALK)[0] == 0
    assert ask(toy, OTHER)[0] == 1
    assert ask(toy, [*TALK, 9, 9])[0] == 0, "a template may leave out what was thought before"
    assert ask(toy, [*TALK, 9, 9, 5])[0] == 0
    assert ask(toy, [*OTHER, 1])[0] == 1


def test_of_two_beginnings_the_longer_decides() -> None:
    toy = toy_engine(n_slots=3)
    for prompt, slot_id in ((TALK[:3], 0), (OTHER, 1), (THIRD, 2)):
        assert ask(toy, prompt)[0] == slot_id
    toy.engine.seats.remembered.erase(1, "")
    assert ask(toy, TALK)[0] == 0
    assert ask(toy, TALK[:3])[0] == 1, "what slot 0 has begins with more than this prompt"
    assert ask(toy, [*TALK, 6])[0] == 0


def test_no_tenant_goes_on_with_anothers_conversation() -> None:
    toy = toy_engine(n_slots=2)
    assert ask(toy, TALK, "a")[0] == 0
    assert ask(toy, [*TALK, 6], "b")[0] == 1
    assert ask(toy, [*TALK, 6], "a")[0] == 0


def test_a_restored_conversation_goes_on_in_its_slot() -> None:
    toy = toy_engine(n_slots=3)
    remembered = toy.engine.seats.remembered
    _, text = ask(toy, TALK)
    found = remembered.save(0, "")
    assert [ask(toy, [n, 9, 9])[0] for n in range(6, 9)] == [1, 2, 0]
    remembered.restore(1, found, "")
    assert ask(toy, [*text, 3])[0] == 1
