"""What runs in a pass: rows within the budget, chunks that end on page borders, drafts that leave room for prompts."""

from __future__ import annotations

import pytest

from slipstream.engine.core import plan
from slipstream.engine.core.plan import Place
from slipstream.engine.speculate.drafter import Draft
from tests.unit.toy import toy_slot

PAGE = 4


def place(slot_id: int, n_tokens: int, n_past: int = 0) -> Place:
    slot = toy_slot(
        f"r{slot_id}", list(range(n_tokens)), slot_id=slot_id, types=("suffix",), n_max=64, max_tokens=100
    )
    slot.n_past = n_past
    return Place.of(slot)


def rows(
    places: list[Place], budget: int, drafts: dict[int, Draft] | None = None
) -> list[tuple[int, int, int]]:
    """(slot, certain rows, drafts) of each piece of work."""
    works = plan.work(places, drafts or {}, budget, PAGE)
    return [(one.slot.id, one.n_certain, len(one.draft)) for one in works]


def test_a_pass_has_no_more_rows_than_its_budget() -> None:
    ready = place(0, 9, n_past=8)
    draft = Draft((1, 2, 3), ("suffix",) * 3)
    assert rows([ready, place(1, 10), place(2, 10)], 16, {0: draft}) == [(0, 1, 3), (1, 10, 0), (2, 2, 0)]
    assert rows([ready, place(1, 30), place(2, 10)], 16, {0: draft}) == [(0, 1, 3), (1, 12, 0)]


@pytest.mark.parametrize(
    ("n_past", "budget", "n_certain"), [(0, 14, 12), (3, 14, 13), (0, 3, 3), (0, 99, 30), (29, 9, 1)]
)
def test_a_chunk_ends_on_a_page_border_where_it_can(n_past: int, budget: int, n_certain: int) -> None:
    assert rows([place(0, 30, n_past)], budget) == [(0, n_certain, 0)]


def test_drafts_leave_half_of_the_rows_to_prompts_that_wait() -> None:
    ready, also = place(0, 9, n_past=8), place(1, 9, n_past=8)
    assert [one.n_max for one in plan.wants([ready], 32)] == [31]
    assert [one.n_max for one in plan.wants([ready, also], 32)] == [15, 15]
    assert [one.n_max for one in plan.wants([ready, also, place(2, 40)], 32)] == [7, 7]


def test_no_draft_goes_beyond_the_limit() -> None:
    """The pass itself adds a token."""
    near = place(0, 9, n_past=8)
    near.slot.n_limit = 13
    assert [one.n_max for one in plan.wants([near], 32)] == [3]
    near.slot.n_limit = 10
    assert plan.wants([near], 32) == []
