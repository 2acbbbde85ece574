"""Which tokens run in a step, and how many rows it may have. Pure: slots and drafts in, work out; no torch, no clocks.

Ready slots come first with their drafts, then prompt tokens in what is left of the row budget, oldest first. Both are
spans of a single ragged batch. A pass behind an unread pass is planned in the same way, from the places that the slots
will have if the unread pass keeps every draft: that is the most pages it can need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.engine.batch import Span
from slipstream.engine.images import cut_before
from slipstream.engine.sample.pick import Row
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import NO_DRAFT, UNREAD, Draft, Want

# A pass of prompts alone has twice the rows while a row then takes so much less, and the pass is over in so many
# seconds: a request that comes meanwhile waits for it, and one that is cancelled keeps the device until then.
_CHEAPER, _LONGEST_S = 0.93, 3.0
_MOST_JUDGED = 128  # rows of a prompt whose logits are held at once: each is as wide as the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Sizes that do not change after the start."""

    n_slots: int
    n_ctx: int
    batch_size: int  # rows of one pass
    eos_ids: frozenset[int]
    shared_size: int | None = None  # rows of one in which slots decode; None: as many
    overlaps: bool = False  # a pass may be launched while the pass before it is unread

    def budget(self, seconds_of: Callable[[int], float], *, is_shared: bool) -> int:
        """Most rows of the next pass. No text depends on it: a row's bits are the same in any pass.

        seconds_of: what a pass of so many rows takes. is_shared: slots decode in it, which a long pass would hold up.
        """
        n_rows = self.shared_size or self.batch_size
        while not is_shared and 2 * n_rows <= self.batch_size:
            longer_s = seconds_of(2 * n_rows)
            if longer_s > min(_LONGEST_S, 2.0 * _CHEAPER * seconds_of(n_rows)):
                break
            n_rows *= 2
        return n_rows


@dataclass(frozen=True, slots=True)
class Place:
    """How far a slot is: now, or behind an unread pass, as if that kept every draft."""

    slot: Slot
    n_past: int  # tokens that are through the target
    # What the unread pass adds to the sequence: its drafts, and `UNREAD` for its last pick.
    unread: Sequence[int] = ()
    # Counted once, as a step asks a dozen times. n_gap: certain tokens that have not been through the target; 1 when
    # the slot is ready to decode.
    n_total: int = field(init=False)
    n_gap: int = field(init=False)

    def __post_init__(self) -> None:
        n_total = len(self.slot.tokens) + len(self.unread)
        object.__setattr__(self, "n_total", n_total)
        object.__setattr__(self, "n_gap", n_total - self.n_past)

    @classmethod
    def of(cls, slot: Slot) -> Place:
        return cls(slot, slot.n_past)


@dataclass(frozen=True, slots=True)
class Work:
    """What one slot runs in a pass: known tokens from `start`, then a draft if they reach the sequence's end."""

    slot: Slot
    start: int  # the slot's n_past when the work was planned
    n_certain: int
    n_total: int  # tokens of the sequence when the work was planned
    draft: Draft = NO_DRAFT
    # Counted once, as in a place. n_picks: trailing rows that need a pick, none while known tokens are left over.
    n_rows: int = field(init=False)
    n_picks: int = field(init=False)

    def __post_init__(self) -> None:
        n_drafts = len(self.draft.token_ids)
        reaches_end = self.start + self.n_certain == self.n_total
        object.__setattr__(self, "n_rows", self.n_certain + n_drafts)
        object.__setattr__(self, "n_picks", 1 + n_drafts if reaches_end else 0)

    @classmethod
    def of(cls, place: Place, n_certain: int, draft: Draft = NO_DRAFT) -> Work:
        return cls(place.slot, place.n_past, n_certain, place.n_total, draft)

    @property
    def end(self) -> int:
        """Length of the sequence this work writes, drafts included."""
        return self.start + self.n_rows

    @property
    def n_logits(self) -> int:
        """Trailing rows whose logits are wanted: those that need a pick, and all of a prompt that is judged too."""
        return self.n_rows if self.slot.prompt_logprobs is not None else self.n_picks

    @property
    def span(self) -> Span:
        known = self.slot.tokens[self.start : self.start + self.n_certain]
        certain = [*known, *(UNREAD,) * (self.n_certain - len(known))]
        token_ids = [*certain, *self.draft.token_ids]
        return Span(self.slot.id, token_ids, self.start, len(self.draft), self.n_logits, self.slot.images)

    @property
    def rows(self) -> list[Row]:
        """How the rows that need a pick are scored."""
        if not self.n_picks:
            return []
        n_unread = self.n_total - len(self.slot.tokens)
        return self.slot.rows([*(UNREAD,) * n_unread, *self.draft.token_ids])[n_unread:]

    @property
    def behind(self) -> Place:
        """Where the slot is when this work is done, if all drafts are kept."""
        return Place(self.slot, self.end, (*self.draft.token_ids, UNREAD) if self.n_picks else ())

    def with_draft(self, draft: Draft) -> Work:
        """The same work with that draft in place of its own."""
        return self if draft is self.draft else replace(self, draft=draft)


def wants(places: Sequence[Place], budget: int) -> list[Want]:
    """The slots that may draft, and the most tokens each may add to a pass of `budget` rows.

    While prompts wait, drafts may use at most half of the rows, so that neither starves the other.
    """
    ready = [place for place in places if place.n_gap == 1]
    if not ready:
        return []
    share = (budget if len(ready) == len(places) else budget // 2) // len(ready) - 1
    found = []
    for place in ready:
        n_room = place.slot.n_limit - place.n_total - 1  # the pass itself adds one token
        n_max = min(place.slot.speculate.n_max, n_room, share)
        if place.slot.speculate.types and n_max > 0:
            found.append(Want(place.slot, n_max, place.unread))
    return found


def without_drafts(places: Sequence[Place], budget: int) -> Pass:
    """What the coming pass holds apart from drafts, as far as it is known before them."""
    n_ready = sum(place.n_gap == 1 for place in places)
    n_waiting = sum(place.n_gap for place in places if place.n_gap > 1)
    return Pass(n_ready, n_ready + min(n_waiting, max(0, budget // 2 - n_ready)))


def work(
    places: Sequence[Place],
    drafts: Mapping[int, Draft],
    budget: int,
    page_size: int,
    next_border: Callable[[Slot, int], int | None] = lambda slot, n_past: None,
) -> list[Work]:
    """One piece of work per slot that fits the budget. `drafts` maps slot ids to their drafts.

    A prompt chunk that does not reach the end of its prompt stops at a page border where it can, so that a later
    hit on that page continues the same arithmetic. `next_border` says where a slot must stop behind so many tokens, if
    anywhere. An image whose rows see those behind them is never cut, even if it has more rows than the budget.
    """
    ready = [place for place in places if place.n_gap == 1]
    planned = [Work.of(place, 1, drafts.get(place.slot.id, NO_DRAFT)) for place in ready]
    left = budget - sum(one.n_rows for one in planned)
    for place in places:
        if place.n_gap == 1 or left <= 0:
            continue
        border = next_border(place.slot, place.n_past)
        n_certain = min(place.n_gap, left, place.n_gap if border is None else border - place.n_past)
        if place.slot.prompt_logprobs is not None:
            n_certain = min(n_certain, _MOST_JUDGED)
        if n_certain < place.n_gap:
            aligned = (place.n_past + n_certain) // page_size * page_size - place.n_past
            n_certain = aligned if aligned > 0 else n_certain
        n_certain = cut_before(place.slot.images, place.n_past, place.n_past + n_certain) - place.n_past
        planned.append(Work.of(place, n_certain))
        left -= n_certain
    return planned
