"""The last sequence of every slot: what remains of a slot when its request is over.

Only the tokens and whose they are. What was computed for them lies in the prefix cache, as long as it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.cache import saved
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.saved import Saved
from slipstream.engine.errors import InvalidRequest, SlotFileRefused

SLOT = "id_slot"


@dataclass(frozen=True, slots=True)
class _Sequence:
    """tokens: the slot's own list, which grows while its request runs."""

    tokens: Sequence[int] = ()
    tenant: str = ""


class Remembered:
    """Sequences by slot. A slot that another tenant used last is as good as unused: nothing is told of it."""

    def __init__(self, cache: Cache, n_slots: int) -> None:
        self._cache = cache
        self._last = [_Sequence()] * n_slots

    def put(self, slot_id: int, tokens: Sequence[int], tenant: str) -> None:
        """The slot has begun a sequence."""
        self._last[slot_id] = _Sequence(tokens, tenant)

    def save(self, slot_id: int, tenant: str) -> Saved:
        """What is cached of the slot's sequence; of a running one what is published so far.

        Raises `InvalidRequest` if there is nothing.
        """
        found = saved.save(self._cache, self._tokens(slot_id, tenant), tenant)
        if not found.tokens:
            raise InvalidRequest(
                SLOT,
                f"of slot {slot_id} nothing is cached that could be saved;"
                f" cached are whole pages of {self._cache.page_size} tokens, until others need the room",
            )
        return found

    def restore(self, slot_id: int, found: Saved, tenant: str) -> int:
        """Put a saved sequence back into the cache, as the idle slot's last one.

        Returns how many of its tokens the next request has cached if it begins with them.
        """
        if not saved.fits(self._cache, found):
            raise SlotFileRefused("its tensors have other shapes than this server's cache")
        saved.load(self._cache, found, tenant)
        self.put(slot_id, found.tokens, tenant)
        n_tokens = self._cache.begin(
            slot_id, [*found.tokens, 0], tenant
        )  # any token: the last is never adopted
        self._cache.drop(slot_id)
        return n_tokens

    def erase(self, slot_id: int, tenant: str) -> int:
        """Forget the idle slot's sequence and what only the cache holds of it; returns the number of those tokens."""
        n_tokens = saved.erase(self._cache, self._tokens(slot_id, tenant), tenant)
        if self._last[slot_id].tenant == tenant:
            self._last[slot_id] = _Sequence()
        return n_tokens

    def _tokens(self, slot_id: int, tenant: str) -> Sequence[int]:
        last = self._last[slot_id]
        return last.tokens if last.tenant == tenant else ()
