"""The last sequence of every slot: what remains of a slot when its request is over.

Only the tokens and their tenant are kept here. What was computed for them lies in the prefix cache until evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slipstream.engine.cache import saved
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.saved import Saved
from slipstream.engine.errors import InvalidRequest, SlotFileRefused
from slipstream.engine.images import ImageMark, Marked
from slipstream.engine.slot import Slot

SLOT = "id_slot"


@dataclass(frozen=True, slots=True)
class _Sequence:
    """tokens: the slot's own list, which grows while its request runs; used: later ones have greater numbers."""

    tokens: list[int] = field(default_factory=list)
    n_prompt: int = 0
    used: int = 0
    tenant: str = ""
    images: Sequence[Marked] = ()


class Remembered:
    """Sequences by slot. To a tenant, a slot that another tenant used last looks unused."""

    def __init__(self, cache: Cache, slots: Sequence[Slot | None]) -> None:
        """slots: the engine's own list, None where a slot is idle."""
        self._cache = cache
        self._slots = slots
        self._last = [_Sequence()] * len(slots)
        self._n_put = 0

    def choose(self, free: Sequence[int], slot: Slot) -> int:
        """Which of these slots a request is to have: the one whose conversation it goes on with, if any.

        Otherwise the one used longest ago, so that the last sequences of the others can still be saved.
        """

        def rank(slot_id: int) -> tuple[int, int]:
            last = self._of(slot_id, slot.request.tenant)
            goes_on = slot.tokens[: last.n_prompt] == last.tokens[: last.n_prompt]
            return (last.n_prompt if goes_on else 0), -self._last[slot_id].used

        return max(free, key=rank)

    def begin(self, slot: Slot) -> None:
        """The slot begins its request's sequence."""
        self._put(slot.id, slot.tokens, slot.n_prompt, slot.request.tenant, slot.images)

    def _put(
        self, slot_id: int, tokens: list[int], n_prompt: int, tenant: str, images: Sequence[Marked]
    ) -> None:
        self._n_put += 1
        marks = [ImageMark.of(one) for one in images]
        self._last[slot_id] = _Sequence(tokens, n_prompt, self._n_put, tenant, marks)

    def save(self, slot_id: int, tenant: str) -> Saved:
        """A copy of what is cached of the slot's sequence, if it is the tenant's; while it runs, what is published.

        Raises `InvalidRequest` if there is nothing.
        """
        self._check(slot_id)
        last = self._of(slot_id, tenant)
        found = saved.save(self._cache, last.tokens, tenant, last.images)
        if not found.tokens:
            raise InvalidRequest(
                SLOT,
                f"of slot {slot_id} nothing is cached that could be saved;"
                f" cached are whole pages of {self._cache.page_size} tokens, until others need the room",
            )
        return found

    @torch.inference_mode()
    def restore(self, slot_id: int, found: Saved, tenant: str) -> int:
        """Put what `save` took back into the cache, as an idle slot's last sequence.

        Returns the tokens of it from which a request can go on: less than all where room lacks. Raises
        `InvalidRequest` for a busy slot, `SlotFileRefused` if it is not of this engine's cache.
        """
        self._check_idle(slot_id)
        if not saved.fits(self._cache, found):
            raise SlotFileRefused("its tensors have other shapes than this server's cache")
        saved.load(self._cache, found, tenant)
        self._put(slot_id, [*found.tokens], len(found.tokens), tenant, found.images)
        # 0 stands for any token: the last is never adopted.
        n_tokens = self._cache.begin(slot_id, [*found.tokens, 0], tenant, found.images)
        self._cache.drop(slot_id)
        return n_tokens

    def erase(self, slot_id: int, tenant: str) -> int:
        """Forget an idle slot's sequence and what is cached of it alone; returns the number of those tokens.

        Raises `InvalidRequest` for a busy slot.
        """
        self._check_idle(slot_id)
        last = self._of(slot_id, tenant)
        n_tokens = saved.erase(self._cache, last.tokens, tenant, last.images)
        if self._last[slot_id].tenant == tenant:
            self._last[slot_id] = _Sequence()
        return n_tokens

    def _check(self, slot_id: int) -> None:
        if not 0 <= slot_id < len(self._slots):
            raise InvalidRequest(SLOT, f"there is no slot {slot_id}, only 0 … {len(self._slots) - 1}")

    def _check_idle(self, slot_id: int) -> None:
        self._check(slot_id)
        if self._slots[slot_id] is not None:
            raise InvalidRequest(SLOT, f"slot {slot_id} is busy; try again when its request is over")

    def _of(self, slot_id: int, tenant: str) -> _Sequence:
        last = self._last[slot_id]
        return last if last.tenant == tenant else _Sequence()
