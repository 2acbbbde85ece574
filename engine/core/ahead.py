"""The pass behind a pass that nobody has read, so that a device never waits for the host.

It is planned as if the running pass kept all its drafts: more pages than that it cannot need. What its tokens are, and
how far back its spans really begin, the device finds out (`engine.speculate.tails`). Once the running pass has been
read, the next one is work like any other. Whoever turns out to have ended in between has run in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.engine.batch import Download
from slipstream.engine.cache.cache import Cache
from slipstream.engine.core import forward, plan
from slipstream.engine.core.forward import Behind, Flight, Target
from slipstream.engine.core.plan import Place, Work
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.acceptance import coupled
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.drafter import Draft
from slipstream.engine.speculate.tails import Tails

Plan = Callable[[Sequence[Place], dict[int, Draft]], list[Work]]


@dataclass(frozen=True, slots=True)
class Ahead:
    """What launches such passes."""

    cache: Cache
    chain: Chain
    batch_size: int
    work: Plan  # as `engine.core.plan.work`, of places and drafts by slot id

    def launch(self, target: Target, flight: Flight, slots: Sequence[Slot]) -> Flight | None:
        """The pass behind `flight` over the running slots; None where the host has to look at that one first."""
        if target.acceptance is not coupled or not self._is_open(flight, slots):
            return None
        places = self._places(flight, slots)
        following = {one.slot.id for one in flight.works if one is not None and one.n_picks}
        wants = [want for want in plan.wants(places, self.batch_size) if want.slot.id in following]
        foreseen = self.chain.foresee(wants, plan.without_drafts(places, self.batch_size))
        if foreseen is None:
            return None
        works = self.work(places, foreseen.drafts)
        self._commit(flight)
        if not works or not all(self._reserve(one) for one in works):
            return None
        flight.keep_streams()
        spans = [i for i, one in enumerate(works) if one.slot.id in following]
        if not spans:
            return forward.launch(target, self.cache, works)
        tails = Tails.of(flight.ran)
        guesses = None
        if foreseen.wants:
            guesses = foreseen.launch(tails.of_slots([want.slot.id for want in foreseen.wants]))
            if guesses is None:
                return None
        tails = tails.of_slots([works[i].slot.id for i in spans])
        behind = Behind(tails, spans, flight.is_certain, guesses, Download(tails.n_lost))
        return forward.launch(target, self.cache, works, behind)

    def _is_open(self, flight: Flight, slots: Sequence[Slot]) -> bool:
        """Whether the next pass depends on nothing that only the host could do with the running one's picks."""
        if flight.picks is None or any(
            slot.reads_drafts or slot.prompt_logprobs is not None for slot in slots
        ):
            return False
        store = self.cache.stores[forward.STORE]
        if not flight.is_certain and not store.has_pages_alone:
            return False  # how much is kept decides what recurrent layers fold
        works = [one for one in flight.works if one is not None]
        borders = [self.cache.next_border(forward.STORE, one.start, one.slot.n_prompt) for one in works]
        # A snapshot is taken of a state before it moves on.
        return not any(one.end == border for one, border in zip(works, borders, strict=True))

    def _places(self, flight: Flight, slots: Sequence[Slot]) -> list[Place]:
        """Where the slots will be that may then still have something to do."""
        behind = {one.slot.id: one.behind for one in flight.works if one is not None}
        places = [behind.get(slot.id, Place.of(slot)) for slot in slots]
        return [place for place in places if place.n_total < place.slot.n_limit]

    def _commit(self, flight: Flight) -> None:
        """Without drafts all that runs is kept, whatever the picks are, and the next batch is built upon it."""
        for one in flight.works if flight.is_certain else ():
            if one is not None:
                self.cache.commit(one.slot.id, forward.STORE, one.end)

    def _reserve(self, one: Work) -> bool:
        return self.cache.reserve(one.slot.id, forward.STORE, one.start, one.end, len(one.draft))
