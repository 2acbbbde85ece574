"""All drafters of a server, asked for each pass: text drafters guess for every slot, others where they promise more.

For each slot the draft with the greatest expected gain wins, cut to a length that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from torch import Tensor

from slipstream.engine.models.captured import Capturing
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.decide.account import Account
from slipstream.engine.speculate.decide.asking import Asking
from slipstream.engine.speculate.decide.reasons import Reasons
from slipstream.engine.speculate.decide.survival import Shadows, Survival, grades
from slipstream.engine.speculate.decide.value import Lengths, Pass, worth
from slipstream.engine.speculate.drafter import (
    NO_DRAFT,
    NO_DRAFTS,
    UNREAD,
    Call,
    DeviceDrafter,
    Draft,
    Drafter,
    Drafts,
    Guess,
    Guesses,
    Kept,
    Lasting,
    TextDrafter,
    Want,
)
from slipstream.engine.speculate.guard import Guard
from slipstream.engine.speculate.tails import Tails


class Chain:
    """The drafters of a server, with credit for each drafted token to its author.

    by_value: the draft with the greatest expected gain wins; otherwise the first drafter with a draft.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        lengths: Lengths,
        *,
        by_value: bool = True,
        now: Callable[[], float],
    ) -> None:
        """now: a clock in seconds, which the engine goes by too."""
        self._readers = [one for one in drafters if isinstance(one, TextDrafter)]
        self._reader_names = frozenset(one.name for one in self._readers)
        self._on_device = [one for one in drafters if isinstance(one, DeviceDrafter)]
        self._all: Sequence[Drafter] = [*self._readers, *self._on_device]
        self.lengths = lengths
        self._by_value = by_value
        self.now = now
        self._survival = Survival()
        self._shadows = Shadows(self._survival)
        networks = [one.name for one in self._on_device if not one.reads_text]
        self.guard = Guard([one.name for one in drafters], networks, now)
        self.account = Account(self.guard, [one.name for one in self._on_device], lengths, self._survival)
        self._reasons = Reasons(self.guard)
        self._asking = Asking(
            self.guard,
            lengths,
            self._survival,
            self.account,
            self._reasons,
            self._reader_names,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.guard.totals)

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target that any drafter reads."""
        return tuple(sorted({tap for drafter in self._on_device for tap in drafter.taps}))

    def reads_streams(self, slot: Slot) -> bool:
        """Whether any drafter reads the target's streams at the slot's tokens."""
        return any(one.taps and self.guard.serves(one.name, slot) for one in self._on_device)

    def capture(self, capturing: Capturing) -> None:
        """Capture the passes of the networks."""
        for drafter in self._on_device:
            drafter.capture(capturing)

    def begin(self, slot: Slot) -> None:
        """A request enters a slot, or starts over from its tokens."""
        with self.guard.spared():
            self._survival.begin(slot.id)
            self.lengths.begin(slot.id)
            self._shadows.begin(slot)
            self._asking.begin(slot.id)
        for drafter in self._following(slot):
            self.guard.run(drafter.name, "begin", [slot], partial(drafter.begin, slot))

    def end(self, slot: Slot) -> None:
        """A request leaves its slot."""
        with self.guard.spared():
            self._shadows.drop(slot)
            self.lengths.allowance.end(slot)
        for drafter in self._following(slot):
            self.guard.run(drafter.name, "end", [slot], partial(drafter.end, slot))

    def close(self) -> None:
        """The server shuts down."""
        for drafter in self._all:
            if isinstance(drafter, Lasting):
                self.guard.run(drafter.name, "close", [], drafter.close)

    def draft(self, wants: Sequence[Want], coming: Pass, tails: Tails | None = None) -> Drafts | None:
        """One draft per want, empty where no drafter has a draft worth its cost.

        tails: where an unread pass ends, for wants behind it. The drafts are unread then; or None, if that pass has to
        be read first: because text drafters have lately been worth it, or have a draft already, or because the network
        that pays cannot go on guessing without the host.
        """
        drafts: Drafts | None = NO_DRAFTS
        if wants:
            with self.guard.spared():
                drafts = self._chosen(wants, coming, tails)
        if drafts is not None:
            with self.guard.spared():
                self.account.drafted(wants, drafts)
        return drafts

    def _chosen(self, wants: Sequence[Want], coming: Pass, tails: Tails | None) -> Drafts | None:
        self._reasons.clear()
        self.account.start()
        self.lengths.allowance.start()
        if self.lengths.measures_plain(coming):
            self._reasons.note([want.slot for want in wants], "plain_measured")
            self.account.measures_plain = True
            return Drafts(self._explained(wants, {}))
        read = [want.slot.id for want in wants if self._asking.is_read(want.slot)]
        if tails is not None:
            behind = self._behind(wants, coming, tails, read)
            if behind is None:  # all are asked again once that pass is read
                self.lengths.allowance.undo()
            return behind
        self.lengths.overlap.ask(read)
        offers = self._text_drafts(wants, coming)
        for drafter in self._on_device:
            offers = self._with_network(drafter, wants, offers, coming)
        limits = self.lengths.trim([one.survival for one in offers], coming)
        drafts = zip(wants, offers, limits, strict=True)
        made = {want.slot.id: _cut(one, limit, want.slot.speculate.n_min) for want, one, limit in drafts}
        return Drafts(self._explained(wants, made))

    def _explained(self, wants: Sequence[Want], drafts: Mapping[int, Draft]) -> dict[int, Draft]:
        """The drafts by slot id, and for requests that ask the reason where there is none."""
        silent = [want.slot for want in wants if want.slot.request.steps and not drafts.get(want.slot.id)]
        return {**drafts, **{slot.id: Draft(why_not=self._reasons.of(slot)) for slot in silent}}

    def _behind(
        self, wants: Sequence[Want], coming: Pass, tails: Tails, read: Sequence[int]
    ) -> Drafts | None:
        """The drafts behind an unread pass, or None. read: the slots whose text any text drafter reads."""
        n_spared = sum(self._asking.promise(one, wants) for one in self._on_device if one.reads_text)
        if self.lengths.overlap.reads_first(read, self.lengths.token_s(coming), n_spared):
            return None
        known = [replace(want, after=()) for want in wants]
        survivals = [one.survival for one in self._text_drafts(known, coming)]
        limits = self.lengths.trim(survivals, coming)
        n_offered = sum(float(one[:n].sum()) for one, n in zip(survivals, limits, strict=True))
        return None if n_offered > n_spared else self._unread_drafts(wants, coming, tails)

    def _unread_drafts(self, wants: Sequence[Want], coming: Pass, tails: Tails) -> Drafts | None:
        """The drafts of the drafter that promises most and enough, as deep as can be chosen before they are known."""
        promise = partial(self._asking.promise, wants=wants)
        for drafter in sorted(self._on_device, key=promise, reverse=True):
            asked = self._asking.asked(drafter, dict(enumerate(wants)), [NO_DRAFT] * len(wants), coming)
            if any(want.slot.speculate.p_min > 0 for want in asked.values()):
                return None  # unsure guesses are not to be verified, and only the host cuts a draft
            if asked:
                drafts = self._launched(drafter, list(asked.values()), tails)
                return drafts and replace(drafts, by_slot=self._explained(wants, drafts.by_slot))
        return Drafts(self._explained(wants, {}))

    def _launched(self, drafter: DeviceDrafter, wants: Sequence[Want], tails: Tails) -> Drafts | None:
        slots = [want.slot for want in wants]
        n_unfed = sum(drafter.n_unfed(slot) for slot in slots)
        call = Call(drafter.name, max(want.n_max for want in wants), n_unfed)
        ends = tails.of_slots([slot.id for slot in slots])

        def launch() -> tuple[Guesses, Tensor] | None:
            guesses = drafter.draft(wants, ends)
            return None if guesses is None else (guesses, guesses.token_ids)

        launched = self.guard.run(drafter.name, "draft", slots, launch)
        if launched is None:
            return None
        guesses, token_ids = launched

        def read() -> dict[int, Draft]:
            with self.guard.spared():
                known = [replace(want, after=()) for want in wants]
                made = self._offers(drafter, known, guesses.read, "read")
                return {slot.id: one for slot, one in zip(slots, made, strict=True)}
            return dict.fromkeys([slot.id for slot in slots], NO_DRAFT)

        planned = {
            want.slot.id: Draft((UNREAD,) * want.n_max, (drafter.name,) * want.n_max) for want in wants
        }
        return Drafts(planned, token_ids, read, call)

    def _text_drafts(self, wants: Sequence[Want], coming: Pass) -> list[Draft]:
        """The best continuation for each want, of those text drafters that pay for being asked."""
        offers, token_s = [NO_DRAFT] * len(wants), self.lengths.token_s(coming)
        for drafter in self._readers:
            call_s = self.lengths.costs.draft_s(drafter.name, 0)
            served = [
                i
                for i, want in enumerate(wants)
                if self.guard.serves(drafter.name, want.slot)
                and self.lengths.allowance.pays(want.slot, drafter.name, call_s, token_s)
            ]
            if not served:
                continue
            asked = [wants[i] for i in served]
            started = self.now()
            made = self._offers(drafter, asked, partial(drafter.draft, asked))
            self.lengths.costs.drafted(drafter.name, 0, (self.now() - started) / len(served))
            for i, offer in zip(served, made, strict=True):
                offers[i] = self._better(offers[i], offer, coming)
        return offers

    def _with_network(
        self, drafter: DeviceDrafter, wants: Sequence[Want], offers: Sequence[Draft], coming: Pass
    ) -> list[Draft]:
        """The drafts after a network has been asked, for slots where it promises more, as deep as it pays."""
        open_to_it = {i: want for i, want in enumerate(wants) if self._by_value or not offers[i]}
        asked = self._asking.asked(drafter, open_to_it, offers, coming)
        if not asked:
            return list(offers)
        wanted = list(asked.values())
        n_unfed = sum(drafter.n_unfed(want.slot) for want in wanted)
        started = self.now()
        made = self._offers(drafter, wanted, lambda: _read(drafter.draft(wanted)))
        deepest = max(len(offer) for offer in made)
        if deepest:
            self.lengths.costs.drafted(drafter.name, deepest, self.now() - started, n_unfed)
        better = list(offers)
        for i, offer in self._extended(wants, dict(zip(asked, made, strict=True)), coming).items():
            better[i] = self._better(offers[i], offer, coming)
        return better

    def _extended(self, wants: Sequence[Want], made: Mapping[int, Draft], coming: Pass) -> dict[int, Draft]:
        """Networks' drafts, each extended by what a text drafter expects to follow it. Keys index `wants`."""
        open_ends = {
            i: Want(wants[i].slot, wants[i].n_max - len(draft), draft.token_ids)
            for i, draft in made.items()
            if self._by_value and 0 < len(draft) < wants[i].n_max
        }
        more = dict(zip(open_ends, self._text_drafts(list(open_ends.values()), coming), strict=True))
        return {i: draft.followed_by(more.get(i, NO_DRAFT)) for i, draft in made.items()}

    def _better(self, first: Draft, second: Draft, coming: Pass) -> Draft:
        if not second or not self._by_value:
            return first or second
        price = self.lengths.price(coming)
        return second if worth(second.survival, price) > worth(first.survival, price) else first

    def _offers(
        self,
        drafter: Drafter,
        wants: Sequence[Want],
        guess: Callable[[], Sequence[Guess]],
        verb: str = "draft",
    ) -> list[Draft]:
        """The drafter's guesses as drafts with their survivals. guess: makes or reads them; verb: which of the two."""

        def make() -> list[Draft]:
            return [self._offer(drafter.name, want, one) for want, one in zip(wants, guess(), strict=True)]

        # Guesses are read inside the guard: those of a wrong shape are a failure of their drafter, not of the engine.
        slots = [want.slot for want in wants]
        self._reasons.note(slots, "no_guess")
        made = self.guard.run(drafter.name, verb, slots, make)
        return [NO_DRAFT] * len(wants) if made is None else made

    def _offer(self, name: str, want: Want, guess: Guess) -> Draft:
        token_ids = tuple(guess.token_ids[: want.n_max])
        constraint = want.slot.constraint
        if constraint is not None:
            token_ids = token_ids[: constraint.n_legal(want.after, token_ids)]
        if not token_ids:
            return NO_DRAFT
        self.account.has_offers = True
        self._reasons.note((want.slot,), "rows_too_dear")
        grade = grades(guess.survival, len(token_ids))
        if not want.after:
            self._shadows.watch(want.slot, name, token_ids, grade)
        return Draft(token_ids, (name,) * len(token_ids), self._survival.of(name, want.slot, grade))

    def accept(self, kept: Sequence[Kept]) -> None:
        """Learn how good the guesses were, and hand the drafters what each slot of the pass gained.

        A network gets all of it, a text drafter only passes that verified its tokens; the rest it reads off the slot.
        """
        with self.guard.spared():
            for one in kept:
                for name in self._shadows.judge(one.slot, one.draft.sources[: one.n_accepted]):
                    self.lengths.allowance.refund(one.slot, name)
                    self._asking.prove(name, one.slot)
        for reader in self._readers:
            self._accept(reader, [one for one in kept if reader.name in one.draft.sources])
        for network in self._on_device:
            self._accept(network, kept)

    def _accept(self, drafter: Drafter, kept: Sequence[Kept]) -> None:
        followed = [one for one in kept if self.guard.serves(drafter.name, one.slot)]
        if followed:
            slots = [one.slot for one in followed]
            self.guard.run(drafter.name, "accept", slots, partial(drafter.accept, followed))

    def credit(self, slot: Slot, draft: Draft, n_accepted: int, coming: Pass) -> None:
        """Count a verified draft for the authors of its tokens, and add what it gained to their savings.

        coming: the pass that verified it, as `draft` was given it.
        """
        with self.guard.spared():
            self._credit(slot, draft, n_accepted, coming)

    def _credit(self, slot: Slot, draft: Draft, n_accepted: int, coming: Pass) -> None:
        n_read = sum(source in self._reader_names for source in draft.sources[:n_accepted])
        self.lengths.overlap.gain(slot.id, n_read)
        if not draft:
            return
        price, token_s = self.lengths.price(coming), self.lengths.token_s(coming)
        for name in dict.fromkeys(draft.sources):
            positions = [i for i, source in enumerate(draft.sources) if source == name]
            self.guard.credit(name, slot, positions, n_accepted)
            n_gained = sum(position < n_accepted for position in positions) - price * len(positions)
            self.lengths.allowance.credit(slot, name, n_gained, token_s)

    def pass_s(self, n_rows: int) -> float:
        """Expected seconds of a pass; infinite where that cannot be told."""
        with self.guard.spared():
            return self.lengths.costs.at(n_rows)
        return inf

    def waited(self, seconds: float) -> None:
        """Learn that the device has waited for the host between two passes."""
        with self.guard.spared():
            self.lengths.overlap.waited(seconds)

    def passed(self, n_rows: int, seconds: float, unread: Call | None = None, *, is_usual: bool) -> None:
        """Learn what a pass took, with the draft before it if that is unread.

        is_usual: that says what the next one takes.
        """
        with self.guard.spared():
            if is_usual:
                self.lengths.costs.passed(n_rows, seconds, unread)
            self.account.worked(seconds)

    def _following(self, slot: Slot) -> list[Drafter]:
        return [drafter for drafter in self._all if self.guard.serves(drafter.name, slot)]


def _read(guesses: Guesses | None) -> list[Guess]:
    """The guesses of a network that was asked while no pass is unread: it never declines then."""
    assert guesses is not None
    return guesses.read()


def _cut(draft: Draft, limit: int, n_min: int) -> Draft:
    """As much of the draft as is worth verifying, and at least the request's minimum; or nothing."""
    n = max(limit, min(n_min, len(draft))) if limit else 0
    return draft.first(n) if n >= max(1, n_min) else NO_DRAFT
