"""Which tokens run in a step. Pure: slots and drafts in, work out; no torch, no clocks.

Ready slots come first with their drafts, then prompt tokens in what is left of the row budget, oldest first.
Both are spans of one ragged batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.batch import Span
from engine.slot import Slot
from engine.speculate.drafter import NO_DRAFT, Draft, Want
from engine.speculate.length import Pass

_MOST_JUDGED = 128  # rows of a prompt whose logits are held at once: each is as wide as the vocabulary


@dataclass(frozen=True, slots=True)
class Work:
    """What one slot runs in a pass: known tokens from `start`, then a draft if they reach the sequence's end."""

    slot: Slot
    start: int  # the slot's n_past when the work was planned
    n_certain: int
    n_total: int  # tokens of the sequence when the work was planned
    draft: Draft = NO_DRAFT

    @classmethod
    def of(cls, slot: Slot, n_certain: int, draft: Draft = NO_DRAFT) -> Work:
        return cls(slot, slot.n_past, n_certain, len(slot.tokens), draft)

    @property
    def n_rows(self) -> int:
        return self.n_certain + len(self.draft)

    @property
    def end(self) -> int:
        """Length of the sequence this work writes, drafts included."""
        return self.start + self.n_rows

    @property
    def n_logits(self) -> int:
        """Trailing rows whose logits are wanted: those that need a pick, and all of a prompt that is judged too."""
        return self.n_rows if self.slot.prompt_logprobs is not None else self.n_picks

    @property
    def n_picks(self) -> int:
        """Trailing rows that need a pick: none while known tokens are left over."""
        reaches_end = self.start + self.n_certain == self.n_total
        return 1 + len(self.draft) if reaches_end else 0

    @property
    def span(self) -> Span:
        certain = self.slot.tokens[self.start : self.start + self.n_certain]
        return Span(
            self.slot.id, [*certain, *self.draft.token_ids], self.start, len(self.draft), self.n_logits
        )

    def with_draft_of(self, n_drafts: int) -> Work:
        """The same work with the first tokens of its draft only."""
        draft = Draft(self.draft.token_ids[:n_drafts], self.draft.sources[:n_drafts])
        return replace(self, draft=draft)

    def without_draft(self) -> Work:
        return replace(self, draft=NO_DRAFT)


def wants(slots: Sequence[Slot], budget: int) -> list[Want]:
    """The slots that may draft, and the most tokens each may add to a pass of `budget` rows.

    While prompts wait, drafts may use at most half of the rows, so that neither starves the other.
    """
    ready = [slot for slot in slots if slot.n_gap == 1]
    if not ready:
        return []
    share = (budget if len(ready) == len(slots) else budget // 2) // len(ready) - 1
    limits = [min(slot.speculate.n_max, slot.n_room, share) if slot.speculate.types else 0 for slot in ready]
    return [Want(slot, limit) for slot, limit in zip(ready, limits, strict=True) if limit > 0]


def without_drafts(slots: Sequence[Slot], budget: int) -> Pass:
    """What the coming pass holds apart from drafts, as far as it is known before them."""
    n_ready = sum(slot.n_gap == 1 for slot in slots)
    n_waiting = sum(slot.n_gap for slot in slots if slot.n_gap > 1)
    return Pass(n_ready, n_ready + min(n_waiting, max(0, budget // 2 - n_ready)))


def work(
    slots: Sequence[Slot],
    drafts: Mapping[int, Draft],
    budget: int,
    page_size: int,
    next_border: Callable[[Slot], int | None] = lambda slot: None,
) -> list[Work]:
    """One piece of work per slot that fits the budget. `drafts` maps slot ids to their drafts.

    A prompt chunk that does not reach the end of its prompt stops at a page border where it can, so that a later
    hit on that page continues the same arithmetic. `next_border` says where it must stop, if anywhere.
    """
    planned = [Work.of(slot, 1, drafts.get(slot.id, NO_DRAFT)) for slot in slots if slot.n_gap == 1]
    left = budget - sum(one.n_rows for one in planned)
    for slot in slots:
        if slot.n_gap == 1 or left <= 0:
            continue
        border = next_border(slot)
        n_certain = min(slot.n_gap, left, slot.n_gap if border is None else border - slot.n_past)
        if slot.prompt_logprobs is not None:
            n_certain = min(n_certain, _MOST_JUDGED)
        if n_certain < slot.n_gap:
            aligned = (slot.n_past + n_certain) // page_size * page_size - slot.n_past
            n_certain = aligned if aligned > 0 else n_certain
        planned.append(Work.of(slot, n_certain))
        left -= n_certain
    return planned
