"""Several drafters as one: free ones guess for every slot, networks where they promise more, the best draft wins.

The chain is where a drafter's failure stops: it is switched off for the request, and for all after three. It also
keeps each drafter's figures.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from slipstream.engine.batch import Download
from slipstream.engine.models.captured import Capturing
from slipstream.engine.slot import DrafterTally, Slot
from slipstream.engine.speculate.decide.length import Lengths, Pass
from slipstream.engine.speculate.decide.offer import NO_OFFER, Offer
from slipstream.engine.speculate.decide.shadow import Shadows
from slipstream.engine.speculate.decide.survival import Survival, grades
from slipstream.engine.speculate.drafter import NO_DRAFT, Draft, Drafter, Guess, Kept, Want
from slipstream.engine.speculate.foreseen import Foreseen, UnreadDrafts
from slipstream.engine.speculate.tails import Tails

log = logging.getLogger(__name__)

_MOST_FAILURES = 3
_TRIAL = 4  # tokens asked of a network that promises too little
_ALARM_AFTER = 500  # drafted tokens of a network
_ALARM_BELOW = 0.05  # accepted share of them

T = TypeVar("T")


class Chain:
    """The drafters of a server, with credit for each drafted token to its author.

    by_value: the draft with the greatest expected gain wins; otherwise that of the first drafter that has one.
    """

    def __init__(self, drafters: Sequence[Drafter], lengths: Lengths, *, by_value: bool = True) -> None:
        self._free = [one for one in drafters if one.is_free]
        self._networks = [one for one in drafters if not one.is_free]
        self.lengths = lengths
        self._by_value = by_value
        self._survival = Survival()
        self._shadows = Shadows(self._survival)
        self._coming = Pass(1, 1)  # what is drafted for, or was last
        self._token_s = lengths.token_s(self._coming)
        self._failures: Counter[str] = Counter()
        self._totals = {one.name: DrafterTally() for one in drafters}
        self._doubtful: set[str] = set()
        self._warned_of: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._totals)

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target that any drafter reads."""
        return tuple(sorted({tap for drafter in self._networks for tap in drafter.taps}))

    @property
    def totals(self) -> Mapping[str, DrafterTally]:
        """Each drafter's figures over all requests."""
        return self._totals

    @property
    def disabled(self) -> tuple[str, ...]:
        """Drafters that failed too often and are asked no more."""
        return tuple(name for name in self.names if self._failures[name] >= _MOST_FAILURES)

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Networks whose guesses are so rarely right that something must be wrong with them."""
        return tuple(sorted(self._doubtful))

    def capture(self, capturing: Capturing) -> None:
        """Capture the passes of the networks."""
        for drafter in self._networks:
            drafter.capture(capturing)

    def begin(self, slot: Slot) -> None:
        """A request enters a slot, or starts over from its tokens."""
        self.lengths.begin(slot.id)
        self._survival.begin(slot.id)
        self._shadows.drop(slot.id)
        self._tell_each("begin", slot)

    def rollback(self, slot: Slot) -> None:
        """The slot's tokens have become fewer."""
        self.lengths.begin(slot.id)
        self._shadows.drop(slot.id)
        self._tell_each("rollback", slot)

    def end(self, slot: Slot) -> None:
        """A request leaves its slot."""
        self._shadows.drop(slot.id)
        self._tell_each("end", slot)

    def close(self) -> None:
        """The server shuts down."""
        for drafter in (*self._free, *self._networks):
            self._run(drafter, "close", [], drafter.close)

    def draft(self, wants: Sequence[Want], coming: Pass) -> list[Draft]:
        """One draft per want, empty where no drafter has one worth its cost."""
        if not wants:
            return []
        self._coming, self._token_s = coming, self.lengths.token_s(coming)
        self.lengths.gap.ask(self._read(wants))
        offers = self._free_offers(wants)
        for drafter in self._networks:
            offers = self._with_network(drafter, wants, offers, coming)
        limits = self.lengths.trim([one.survival for one in offers], coming)
        return [
            _cut(offer, limit, want.slot.speculate.n_min)
            for want, offer, limit in zip(wants, offers, limits, strict=True)
        ]

    def foresee(self, wants: Sequence[Want], coming: Pass) -> Foreseen | None:
        """What to draft behind a pass that nobody has read; None where the host has to look at that one first.

        So it has where drafters that read text have lately been worth it or have something to say already, and where
        the network that pays cannot go on without the host. wants: as for `Drafter.ahead`.
        """
        if not wants:
            return Foreseen()
        self._coming, self._token_s = coming, self.lengths.token_s(coming)
        if self.lengths.gap.pays(self._read(wants), self._token_s):
            return None
        known = [replace(want, after=()) for want in wants]
        offers = self._free_offers(known)
        if any(self.lengths.trim([one.survival for one in offers], coming)):
            return None
        for drafter in self._networks:
            able = [want for want in wants if self._serves(drafter, want.slot)]
            depths, trials = self._depths(drafter, able, [NO_OFFER] * len(able), coming)
            asked = [
                replace(want, n_max=n)
                for want, n in zip(able, depths, strict=True)
                if n >= max(1, want.slot.speculate.n_min)
            ]
            if any(want.slot.speculate.p_min > 0 for want in asked):
                return None  # what is not sure is not to be verified, and only the host cuts a draft
            if asked:
                return Foreseen(asked, drafter.name, partial(self._ahead, drafter, asked, trials))
        return Foreseen()

    def _ahead(
        self, drafter: Drafter, wants: Sequence[Want], trials: Sequence[Slot], tails: Tails
    ) -> UnreadDrafts | None:
        slots = [want.slot for want in wants]
        unread = self._run(drafter, "draft", slots, partial(drafter.ahead, wants, tails))
        if unread is None:
            return None
        self._pay(drafter, trials)

        def learn() -> None:
            self._offers(drafter, [replace(want, after=()) for want in wants], unread.read)

        return UnreadDrafts(unread.token_ids, Download(unread.token_ids), learn)

    def _free_offers(self, wants: Sequence[Want]) -> list[Offer]:
        """The best continuation for each want, of those free drafters that pay for being asked."""
        offers = [NO_OFFER] * len(wants)
        for drafter in self._free:
            served = [
                i
                for i, want in enumerate(wants)
                if self._serves(drafter, want.slot) and self._affords(drafter, want.slot, 1)
            ]
            if not served:
                continue
            self._pay(drafter, [wants[i].slot for i in served], 1)
            started = time.perf_counter()
            made = self._offers(drafter, [wants[i] for i in served])
            self.lengths.drafted(drafter.name, 1, (time.perf_counter() - started) / len(served))
            for i, offer in zip(served, made, strict=True):
                offers[i] = self._better(offers[i], offer)
        return offers

    def _with_network(
        self, drafter: Drafter, wants: Sequence[Want], offers: Sequence[Offer], coming: Pass
    ) -> list[Offer]:
        """The offers after a network has drafted, where it promises more than what is there, as deep as it pays."""
        able = [
            i
            for i, want in enumerate(wants)
            if self._serves(drafter, want.slot) and (self._by_value or not offers[i])
        ]
        depths, trials = self._depths(drafter, [wants[i] for i in able], [offers[i] for i in able], coming)
        self._pay(drafter, trials)
        asked = {i: Want(wants[i].slot, depth) for i, depth in zip(able, depths, strict=True) if depth}
        started = time.perf_counter()
        made = self._offers(drafter, list(asked.values()))
        deepest = max((len(offer) for offer in made), default=0)
        if deepest:
            self.lengths.drafted(drafter.name, deepest, time.perf_counter() - started)
        better = list(offers)
        for i, offer in self._extended(wants, dict(zip(asked, made, strict=True))).items():
            better[i] = self._better(offers[i], offer)
        return better

    def _depths(
        self, drafter: Drafter, wants: Sequence[Want], offers: Sequence[Offer], coming: Pass
    ) -> tuple[list[int], list[Slot]]:
        """How many tokens to ask a network for, per slot; and the slots where that is a trial, to be paid.

        Where it promises too little it is now and then asked for a few all the same; whether they are verified or
        not, the text will judge them. Where costs count as nothing there is nothing to find out.
        """
        if not wants:
            return [], []
        most = [min(want.n_max, drafter.longest) for want in wants]
        expected = [
            self._survival.expected(drafter.name, want.slot.id, n)
            for want, n in zip(wants, most, strict=True)
        ]
        depth, takes = self.lengths.depth(drafter.name, [one.survival for one in offers], expected, coming)
        depths: list[int] = []
        trials: list[Slot] = []
        for want, n_most, taken in zip(wants, most, takes, strict=True):
            n = depth if taken else 0
            if not taken and self.lengths.adaptive and self._affords(drafter, want.slot, _TRIAL):
                n = _TRIAL
                trials.append(want.slot)
            # A draft worth making is asked for at the request's least length, or it would be thrown away.
            depths.append(min(n_most, max(n, want.slot.speculate.n_min)) if n else 0)
        return depths, trials

    def _extended(self, wants: Sequence[Want], made: Mapping[int, Offer]) -> dict[int, Offer]:
        """Networks' drafts, each gone on with by what a free drafter knows to follow it. Keys index `wants`."""
        open_ends = {
            i: Want(wants[i].slot, wants[i].n_max - len(offer), offer.token_ids)
            for i, offer in made.items()
            if self._by_value and 0 < len(offer) < wants[i].n_max
        }
        more = dict(zip(open_ends, self._free_offers(list(open_ends.values())), strict=True))
        return {i: offer.followed_by(more.get(i, NO_OFFER)) for i, offer in made.items()}

    def _better(self, first: Offer, second: Offer) -> Offer:
        if not second or not self._by_value:
            return first or second
        price = self.lengths.price(self._coming)
        return second if second.worth(price) > first.worth(price) else first

    def _offers(
        self, drafter: Drafter, wants: Sequence[Want], guess: Callable[[], Sequence[Guess]] | None = None
    ) -> list[Offer]:
        """The drafter's guesses with their survivals. guess: makes them; None: `draft` does."""
        if not wants:
            return []

        def make() -> list[Offer]:
            guesses = drafter.draft(wants) if guess is None else guess()
            return [
                self._offer(drafter.name, want, guess) for want, guess in zip(wants, guesses, strict=True)
            ]

        # Guesses are read inside the guard: one of a wrong shape is a failure of its drafter, not of the engine.
        made = self._run(drafter, "draft", [want.slot for want in wants], make)
        return [NO_OFFER] * len(wants) if made is None else made

    def _offer(self, name: str, want: Want, guess: Guess) -> Offer:
        token_ids = tuple(guess.token_ids[: want.n_max])
        constraint = want.slot.constraint
        if constraint is not None:
            token_ids = token_ids[: constraint.n_legal(want.after, token_ids)]
        if not token_ids:
            return NO_OFFER
        grade = grades(guess.survival, len(token_ids))
        if not want.after:
            self._shadows.watch(want.slot, name, token_ids, grade)
        return Offer(token_ids, (name,) * len(token_ids), self._survival.of(name, want.slot.id, grade))

    def accept(self, kept: Sequence[Kept]) -> None:
        """Learn how good the guesses were, and tell the drafters what each slot of the pass gained.

        A free drafter is told where tokens of its own were verified; all else it reads off the slot when it is asked.
        """
        for one in kept:
            for name in self._shadows.judge(one.slot):
                self.lengths.allowance.refund(one.slot, name)
        for drafter in (*self._free, *self._networks):
            told = [
                one
                for one in kept
                if (not drafter.is_free or drafter.name in one.draft.sources)
                and self._follows(drafter, one.slot)
            ]
            if told:
                slots = [one.slot for one in told]
                self._run(drafter, "accept", slots, partial(drafter.accept, told))

    def credit(self, slot: Slot, draft: Draft, n_accepted: int) -> None:
        """Count a verified draft for the authors of its tokens, to whom it brings in what it gained."""
        free = {one.name for one in self._free}
        self.lengths.gap.gain(slot.id, sum(source in free for source in draft.sources[:n_accepted]))
        if not draft:
            return
        price = self.lengths.price(self._coming)
        for name in dict.fromkeys(draft.sources):
            positions = [i for i, source in enumerate(draft.sources) if source == name]
            for tally in (slot.stats.tally(name), self._totals[name]):
                tally.credit(positions, n_accepted)
            n_gained = sum(position < n_accepted for position in positions) - price * len(positions)
            self.lengths.allowance.credit(slot, name, n_gained, self._token_s)
            self._watch_over(name)

    def _watch_over(self, name: str) -> None:
        """Say once that a network is hardly ever right: it is then nearly always a wrong one."""
        total = self._totals[name]
        if total.n_drafted < _ALARM_AFTER or name not in {one.name for one in self._networks}:
            return
        n_accepted = sum(total.accepted_by_position)
        if n_accepted >= _ALARM_BELOW * total.n_drafted:
            self._doubtful.discard(name)
            return
        self._doubtful.add(name)
        if name not in self._warned_of:
            self._warned_of.add(name)
            log.warning(
                "drafter %s: %d of %d drafted tokens were accepted. Usual causes: a network made for another model,"
                " hidden states of the wrong layers (--draft-taps), or another version of the target's weights",
                name,
                n_accepted,
                total.n_drafted,
            )

    def _tell_each(self, verb: str, slot: Slot) -> None:
        for drafter in (*self._free, *self._networks):
            if self._follows(drafter, slot):
                self._run(drafter, verb, [slot], partial(getattr(drafter, verb), slot))

    def _follows(self, drafter: Drafter, slot: Slot) -> bool:
        """Whether the drafter is told of the slot; one that is not costs it nothing, not even its prompt.

        A drafter that reads the target's streams follows every slot: what it misses now is missing in the prefixes
        that later requests adopt.
        """
        return (bool(drafter.taps) or self._asks(drafter, slot)) and self._works(drafter, slot)

    def _affords(self, drafter: Drafter, slot: Slot, n_positions: int) -> bool:
        """Whether the drafter can be asked on trial, for so many positions; whatever a free one says, it is one."""
        seconds = self.lengths.draft_s(drafter.name, n_positions)
        return self.lengths.allowance.affords(slot, drafter.name, seconds, self._token_s)

    def _pay(self, drafter: Drafter, slots: Sequence[Slot], n_positions: int = _TRIAL) -> None:
        """The drafter is tried for these slots."""
        seconds = self.lengths.draft_s(drafter.name, n_positions)
        for slot in slots:
            self.lengths.allowance.pay(slot, drafter.name, seconds)

    def _read(self, wants: Sequence[Want]) -> list[int]:
        """The slots whose text any drafter reads."""
        return [want.slot.id for want in wants if any(self._serves(one, want.slot) for one in self._free)]

    def _serves(self, drafter: Drafter, slot: Slot) -> bool:
        """Whether the slot uses the drafter's guesses."""
        return self._asks(drafter, slot) and self._works(drafter, slot)

    def _asks(self, drafter: Drafter, slot: Slot) -> bool:
        return slot.speculate.n_max > 0 and drafter.name in slot.speculate.types

    def _works(self, drafter: Drafter, slot: Slot) -> bool:
        return drafter.name not in slot.silenced and self._failures[drafter.name] < _MOST_FAILURES

    def _run(self, drafter: Drafter, verb: str, slots: Sequence[Slot], call: Callable[[], T]) -> T | None:
        """Run a verb of a drafter. If it raises, its requests go on without it; the text does not change."""
        started = time.perf_counter()
        try:
            return call()
        except Exception:
            self._failures[drafter.name] += 1
            for slot in slots:
                slot.silenced.add(drafter.name)
            log.exception(
                "drafter failed name=%s verb=%s requests=%s off_for_all=%s",
                drafter.name,
                verb,
                ",".join(slot.request.id for slot in slots),
                self._failures[drafter.name] >= _MOST_FAILURES,
            )
            return None
        finally:
            seconds = time.perf_counter() - started
            self._totals[drafter.name].call(verb, seconds)
            for slot in slots:
                slot.stats.tally(drafter.name).call(verb, seconds / len(slots))


def _cut(offer: Offer, limit: int, n_min: int) -> Draft:
    """As much of the offer as is worth verifying, and at least the request's minimum; or nothing."""
    n = max(limit, min(n_min, len(offer))) if limit else 0
    return Draft(offer.token_ids[:n], offer.sources[:n]) if n >= max(1, n_min) else NO_DRAFT
