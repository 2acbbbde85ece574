"""Which slots a drafter on a device is asked for in a pass, and for how many tokens.

It is asked where it promises more than other drafts. Where it promises too little it is now and then asked for a few
tokens all the same, as a trial: whether they are verified or not, the text will judge them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.decide.account import Account
from slipstream.engine.speculate.decide.survival import Survival
from slipstream.engine.speculate.decide.value import Floats, Lengths, Pass
from slipstream.engine.speculate.drafter import NO_DRAFT, DeviceDrafter, Draft, Want
from slipstream.engine.speculate.guard import Guard

_TRIAL = 2  # tokens asked of a drafter that promises too little
# Passes of a period. Once in each a slot is weighed for a drafter that promises it too little: periods are the same for
# all slots, so that most passes weigh nothing.
_PERIOD = 8


class Asking:
    """What drafters on devices promise, slot by slot, weighed against what they cost."""

    def __init__(
        self,
        guard: Guard,
        lengths: Lengths,
        survival: Survival,
        account: Account,
        readers: frozenset[str],
    ) -> None:
        """readers: the text drafters."""
        self._guard, self._lengths, self._survival = guard, lengths, survival
        self._account, self._readers = account, readers
        # Drafter and slot id -> the period through which it rests.
        self._rests: dict[tuple[str, int], int] = {}

    def begin(self, slot_id: int) -> None:
        """The slot has another text."""
        for key in [key for key in self._rests if key[1] == slot_id]:
            del self._rests[key]

    def is_read(self, slot: Slot) -> bool:
        """Whether any text drafter reads the slot's text."""
        return not self._readers.isdisjoint(self._guard.serving(slot))

    def promise(self, drafter: DeviceDrafter, wants: Sequence[Want]) -> float:
        """Tokens that a drafter promises in all."""
        return sum(float(one.sum()) for one in self._promised(drafter, wants))

    def asked(
        self, drafter: DeviceDrafter, wants: Sequence[Want], offers: Mapping[int, Draft], coming: Pass
    ) -> list[Want]:
        """What to ask a drafter for. offers: by slot id the other drafts.

        Without adaptive lengths there are no trials.
        """
        served = self._guard.served(drafter.name, wants)
        able = self._able(drafter, served)
        if not able:
            if served:
                self._account.consider(drafter.name, ())
            return []
        promised = self._promised(drafter, able)
        n_unfed = [drafter.n_unfed(want.slot) for want in able]
        free = [offers.get(want.slot.id, NO_DRAFT).survival for want in able]
        depth, takes = self._lengths.depth(drafter.name, free, promised, n_unfed, coming)
        self._account.consider(drafter.name, takes)
        token_s = self._lengths.token_s(coming)
        # Slots are asked for together: a trial pays for what the call does not do anyway.
        draft_s = partial(self._lengths.costs.draft_s, drafter.name)
        made_s = draft_s(min(depth, _TRIAL)) if any(takes) else 0.0
        asked: list[Want] = []
        for want, unfed, known, taken in zip(able, n_unfed, free, takes, strict=True):
            n, n_min = depth, want.slot.speculate.n_min
            if not taken:
                self._refuse(drafter, (want.slot,))
                trial_s = draft_s(_TRIAL, unfed) - made_s
                if want.after:  # unread guesses are all verified
                    trial_s += self._lengths.rows_s(_TRIAL, coming)
                allowance = self._lengths.allowance
                if not self._lengths.adaptive:
                    continue
                n_most = min(want.n_max, drafter.longest)
                trial = want.slot, drafter.name, trial_s, token_s
                # Most cannot be paid for, and that is known in a tenth of the time of the other question.
                if not (
                    allowance.affords(*trial)
                    and self._lengths.could_gain(drafter.name, known, n_most, unfed, coming)
                    and allowance.pays(*trial)
                ):
                    if not len(known):
                        self._rests[drafter.name, want.slot.id] = self._account.n_passes // _PERIOD
                    continue
                n, made_s = _TRIAL, draft_s(_TRIAL)
            # A draft worth making is asked for at the request's least length, or it would be thrown away.
            n = min(want.n_max, drafter.longest, max(n, n_min))
            if n >= max(1, n_min):
                asked.append(replace(want, n_max=n))
        return asked

    def _able(self, drafter: DeviceDrafter, served: Sequence[Want]) -> list[Want]:
        """The wants that it is weighed for: it rests where it promised too little a moment ago."""
        name, period = drafter.name, self._account.n_passes // _PERIOD
        able: list[Want] = []
        resting: list[Slot] = []
        for want in served:
            if self._rests.get((name, want.slot.id)) == period:
                resting.append(want.slot)
            else:
                able.append(want)
        self._refuse(drafter, resting)
        return able

    def _refuse(self, drafter: DeviceDrafter, slots: Sequence[Slot]) -> None:
        """Note for these slots that a network promises too little."""
        if not drafter.reads_text:
            self._account.note(slots, "network_too_slow")

    def _promised(self, drafter: DeviceDrafter, wants: Sequence[Want]) -> list[Floats]:
        """Survivals expected of a drafter for each want before it is asked, [at most n_max]."""
        lengths = [min(want.n_max, drafter.longest) for want in wants]
        known = self._survival.expected(drafter.name, [want.slot for want in wants], max(lengths, default=0))
        return [
            one[:n] if self._may_say_more(drafter, want) else np.zeros(n)
            for one, n, want in zip(known, lengths, wants, strict=True)
        ]

    def _may_say_more(self, drafter: DeviceDrafter, want: Want) -> bool:
        """Whether the slot uses its guesses, and it could know what text drafters have not said."""
        if drafter.name not in self._guard.serving(want.slot):
            return False
        return not drafter.reads_text or bool(want.after) or not self.is_read(want.slot)
