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
        self._asking = Asking(self.guard, lengths, self._survival, self.account, self._reader_names)

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target that any drafter reads."""
        return tuple(sorted({tap for drafter in self._on_device for tap in drafter.taps}))

    def reads_streams(self, slot: Slot) -> bool:
        """Whether any drafter reads the target's streams at the slot's tokens."""
        serving = self.guard.serving(slot)
        return any(one.taps and one.name in serving for one in self._on_device)

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
        self.account.start()
        self.lengths.allowance.start()
        if self.lengths.measures_plain(coming):
            self.account.note([want.slot for want in wants], "plain_measured")
            return Drafts(self._explained(wants, {}))
        if tails is not None:
            behind = self._behind(wants, coming, tails)
            if behind is None:  # all are asked again once that pass is read
                self.lengths.allowance.undo()
            return behind
        if self.lengths.overlap.gap_s:  # else no pass is launched behind another here
            self.lengths.overlap.ask(self._read_slots(wants))
        offers = self._text_drafts(wants, coming)
        for drafter in self._on_device:
            offers |= self._network_drafts(drafter, wants, offers, coming)
        return Drafts(self._explained(wants, self._trimmed(wants, offers, coming)))

    def _trimmed(self, wants: Sequence[Want], offers: Mapping[int, Draft], coming: Pass) -> dict[int, Draft]:
        """As much of each draft as is worth verifying, and at least the request's minimum; or nothing."""
        if not offers:
            return {}
        drafted = [want for want in wants if want.slot.id in offers]
        limits = self.lengths.trim([offers[want.slot.id].survival for want in drafted], coming)
        made: dict[int, Draft] = {}
        for want, limit in zip(drafted, limits, strict=True):
            draft, n_min = offers[want.slot.id], want.slot.speculate.n_min
            n = max(limit, min(n_min, len(draft))) if limit else 0
            if n >= max(1, n_min):
                made[want.slot.id] = draft.first(n)
        return made

    def _read_slots(self, wants: Sequence[Want]) -> list[int]:
        """The slots whose text any text drafter reads."""
        return [want.slot.id for want in wants if self._asking.is_read(want.slot)]

    def _explained(self, wants: Sequence[Want], drafts: Mapping[int, Draft]) -> dict[int, Draft]:
        """The drafts by slot id, and for requests that ask the reason where there is none."""
        silent = [want.slot for want in wants if want.slot.request.steps and not drafts.get(want.slot.id)]
        return {**drafts, **{slot.id: Draft(why_not=self.account.reason_of(slot)) for slot in silent}}

    def _behind(self, wants: Sequence[Want], coming: Pass, tails: Tails) -> Drafts | None:
        """The drafts behind an unread pass, or None."""
        n_spared = sum(self._asking.promise(one, wants) for one in self._on_device if one.reads_text)
        token_s = self.lengths.token_s(coming)
        if self.lengths.overlap.reads_first(self._read_slots(wants), token_s, n_spared):
            return None
        known = [replace(want, after=()) for want in wants]
        survivals = [one.survival for one in self._text_drafts(known, coming).values()]
        limits = self.lengths.trim(survivals, coming)
        n_offered = sum(float(one[:n].sum()) for one, n in zip(survivals, limits, strict=True))
        return None if n_offered > n_spared else self._unread_drafts(wants, coming, tails)

    def _unread_drafts(self, wants: Sequence[Want], coming: Pass, tails: Tails) -> Drafts | None:
        """The drafts of the drafter that promises most and enough, as deep as can be chosen before they are known."""
        promise = partial(self._asking.promise, wants=wants)
        for drafter in sorted(self._on_device, key=promise, reverse=True):
            asked = self._asking.asked(drafter, wants, {}, coming)
            if any(want.slot.speculate.p_min > 0 for want in asked):
                return None  # unsure guesses are not to be verified, and only the host cuts a draft
            if asked:
                drafts = self._launched(drafter, asked, tails)
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
        self.lengths.feeding.called(drafter.name, slots)

        def read() -> dict[int, Draft]:
            made: Mapping[int, Draft] = {}
            with self.guard.spared():
                known = [replace(want, after=()) for want in wants]
                made = self._offers(drafter, known, guesses.read, "read")
            return {slot.id: made.get(slot.id, NO_DRAFT) for slot in slots}

        planned = {
            want.slot.id: Draft((UNREAD,) * want.n_max, (drafter.name,) * want.n_max) for want in wants
        }
        return Drafts(planned, token_ids, read, call)

    def _text_drafts(self, wants: Sequence[Want], coming: Pass) -> dict[int, Draft]:
        """By slot id the best continuation, if any, of those text drafters that pay for being asked."""
        offers: dict[int, Draft] = {}
        token_s = self.lengths.token_s(coming)
        for drafter in self._readers:
            call_s = self.lengths.costs.draft_s(drafter.name, 0)
            served = self.guard.served(drafter.name, wants)
            asked = self.lengths.allowance.paying(served, drafter.name, call_s, token_s)
            if not asked:
                continue
            started = self.now()
            made = self._offers(drafter, asked, partial(drafter.draft, asked))
            self.lengths.costs.drafted(drafter.name, 0, (self.now() - started) / len(asked))
            offers |= self._better(offers, made, coming)
        return offers

    def _network_drafts(
        self, drafter: DeviceDrafter, wants: Sequence[Want], offers: Mapping[int, Draft], coming: Pass
    ) -> dict[int, Draft]:
        """By slot id a network's drafts where they are better than those on offer, as deep as it pays."""
        open_to_it = [want for want in wants if self._by_value or want.slot.id not in offers]
        asked = self._asking.asked(drafter, open_to_it, offers, coming)
        if not asked:
            return {}
        n_unfed = sum(drafter.n_unfed(want.slot) for want in asked)
        self.lengths.feeding.called(drafter.name, [want.slot for want in asked])
        started = self.now()
        made = self._offers(drafter, asked, lambda: _read(drafter.draft(asked)))
        if made:
            deepest = max(map(len, made.values()))
            self.lengths.costs.drafted(drafter.name, deepest, self.now() - started, n_unfed)
        return self._better(offers, self._extended(wants, made, coming), coming)

    def _extended(self, wants: Sequence[Want], made: Mapping[int, Draft], coming: Pass) -> dict[int, Draft]:
        """Networks' drafts, each extended by what a text drafter expects to follow it."""
        open_ends = [
            Want(want.slot, want.n_max - len(draft), draft.token_ids)
            for want in wants
            if self._by_value and (draft := made.get(want.slot.id)) and len(draft) < want.n_max
        ]
        more = self._text_drafts(open_ends, coming)
        return {slot_id: draft.followed_by(more.get(slot_id, NO_DRAFT)) for slot_id, draft in made.items()}

    def _better(
        self, offers: Mapping[int, Draft], made: Mapping[int, Draft], coming: Pass
    ) -> dict[int, Draft]:
        """Those of the drafts just made that are worth more than what is on offer for their slots."""
        if not self._by_value:
            return {slot_id: draft for slot_id, draft in made.items() if slot_id not in offers}
        price = self.lengths.price(coming) if made else 0.0
        return {
            slot_id: draft
            for slot_id, draft in made.items()
            if worth(draft.survival, price) > worth(offers.get(slot_id, NO_DRAFT).survival, price)
        }

    def _offers(
        self,
        drafter: Drafter,
        wants: Sequence[Want],
        guess: Callable[[], Sequence[Guess]],
        verb: str = "draft",
    ) -> dict[int, Draft]:
        """By slot id the drafter's guesses as drafts with their survivals, where it has any.

        guess: makes or reads them; verb: which of the two.
        """

        def make() -> dict[int, Draft]:
            guessed = zip(wants, guess(), strict=True)
            made = {want.slot.id: self._offer(drafter.name, want, one) for want, one in guessed}
            return {slot_id: draft for slot_id, draft in made.items() if draft}

        # Guesses are read inside the guard: those of a wrong shape are a failure of their drafter, not of the engine.
        slots = [want.slot for want in wants]
        self.account.note(slots, "no_guess")
        return self.guard.run(drafter.name, verb, slots, make) or {}

    def _offer(self, name: str, want: Want, guess: Guess) -> Draft:
        token_ids = tuple(guess.token_ids[: want.n_max])
        constraint = want.slot.constraint
        if constraint is not None:
            token_ids = token_ids[: constraint.n_legal(want.after, token_ids)]
        if not token_ids:
            return NO_DRAFT
        self.account.note((want.slot,), "rows_too_dear")
        grade = grades(guess.survival, len(token_ids))
        if not want.after:
            self._shadows.watch(want.slot, name, token_ids, grade)
        return Draft(token_ids, (name,) * len(token_ids), self._survival.of(name, want.slot, grade))

    def accept(self, kept: Sequence[Kept]) -> None:
        """Learn how good the guesses were, and hand the drafters what each slot of the pass gained.

        A network gets that of the slots it follows, a text drafter only passes that verified its tokens; it reads the
        rest off the slot.
        """
        with self.guard.spared():
            for one in kept:
                self._shadows.judge(one.slot)
        for reader in self._readers:
            self._accept(reader, [one for one in kept if reader.name in one.draft.sources])
        for network in self._on_device:
            self._accept(network, [one for one in kept if network.follows(one.slot)])

    def _accept(self, drafter: Drafter, kept: Sequence[Kept]) -> None:
        if followed := self.guard.served(drafter.name, kept):
            slots = [one.slot for one in followed]
            self.guard.run(drafter.name, "accept", slots, partial(drafter.accept, followed))

    def credit(self, slot: Slot, draft: Draft, n_accepted: int, coming: Pass) -> None:
        """Count a verified draft for the authors of its tokens, and add what it gained to their savings.

        coming: the pass that verified it, as `draft` was given it.
        """
        with self.guard.spared():
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
        serving = self.guard.serving(slot)
        return [drafter for drafter in self._all if drafter.name in serving]


def _read(guesses: Guesses | None) -> list[Guess]:
    """The guesses of a network that was asked while no pass is unread: it never declines then."""
    assert guesses is not None
    return guesses.read()
