"""How often a drafter is asked on trial: as often as it earns, and besides for a small share of the time.

Asking takes time, whether or not a draft comes of it. So every drafter has savings per slot, in seconds; not known to
have a draft, it is asked only when its savings pay for the call: a trial. An accepted token earns the time in which
plain decoding makes a token, less that of the rows its draft took. Besides, savings grow with the slot's text, by 0.5 %
of the time in which plain decoding makes it, shared evenly by the slot's drafters. So trials take no more than that
beyond what they earn, whatever a pass costs and however many slots there are.

What savings begin with is worth having where requests differ. Where hardly any of the last requests with trials earned
something by them, a request begins with less, down to nothing.

A request may be too short to save up for one trial. So a part of what a request leaves unused pays for trials of those
that come: a drafter that was wrong in all requests lately is asked again, however short they are.

If passes are expensive, that pays for a trial at every token, and text drafters are always asked. If passes are cheap,
a drafter that earns nothing is asked only every few tokens, and may miss text that it could draft for as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import Want

_MOST = 4.0  # tokens' time that a drafter can save up
_SHARE = 0.005  # of the time of plain decoding
_LEFT = 0.5  # of what a request has left over, that others may use
_MOST_LEFT = 2.0  # trials that all of it pays for
_OF_LAST = 1 / 16  # of the last request in the share of those whose trials earned something
_SHARE_ENOUGH = 0.5  # of them, for requests to begin with all that they may


@dataclass(slots=True)
class _Savings:
    seconds: float
    since: int  # tokens of the slot when they were counted
    grows: float = 0.0  # seconds that they grow by with each token
    gained: float = 0.0  # seconds that came to them since they began
    due: int = 0  # tokens of the slot before which they do not pay for a trial
    is_tried: bool = False
    has_earned: bool = False  # anything, by any draft

    def lacks(self, price: float, left: float, n_tokens: int) -> bool:
        """Whether a trial at this price is known to be too dear. left: what others add; n_tokens: of the slot."""
        return n_tokens < self.due and self.seconds + left < price


class Allowance:
    """Savings of every (slot, drafter). Not adaptive: costs count as nothing.

    token_s, in all methods: seconds in which plain decoding makes a token.
    """

    def __init__(self, *, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._savings: dict[tuple[int, str], _Savings] = {}
        self._left: dict[str, float] = {}  # by drafter, seconds that requests have left to those that come
        self._earning: dict[str, float] = {}  # by drafter, share of the last requests with trials that gained
        self._too_dear: dict[str, float] = {}  # by drafter, the last trial that could not be paid for
        # What was paid for while a pass is decided: who paid, and what it and others' savings were before.
        self._bought: list[tuple[_Savings, float, bool, str, float]] = []

    def begin(self, slot_id: int) -> None:
        """The slot has another text."""
        for key in [key for key in self._savings if key[0] == slot_id]:
            del self._savings[key]

    def end(self, slot: Slot) -> None:
        """The slot's request is over. What a text was given at first is no other's."""
        for slot_id, name in [key for key in self._savings if key[0] == slot.id]:
            own = self._savings.pop((slot_id, name))
            unused = min(own.seconds, own.gained) + (len(slot.tokens) - own.since) * own.grows
            if own.is_tried or own.has_earned:
                share = self._earning.get(name, 1.0)
                self._earning[name] = share + _OF_LAST * (own.has_earned - share)
            most = _MOST_LEFT * self._too_dear.get(name, 0.0)
            self._left[name] = min(self._left.get(name, 0.0) + _LEFT * unused, most)

    def start(self) -> None:
        """Another pass is decided."""
        self._bought.clear()

    def undo(self) -> None:
        """The pass is decided later, and what was paid for since `start` will be paid for then."""
        for own, seconds, is_tried, name, left in reversed(self._bought):
            own.seconds, own.is_tried = seconds, is_tried
            self._left[name] = left
        self._bought.clear()

    def affords(self, slot: Slot, name: str, seconds: float, token_s: float) -> bool:
        """Whether a drafter could pay for a trial that takes so long."""
        if not self._adaptive:
            return True
        own, left = self._savings.get((slot.id, name)), self._left.get(name, 0.0)
        if own is not None and own.lacks(seconds, left, len(slot.tokens)):
            return False
        own = self._counted(slot, name, seconds, token_s)
        if own.seconds + left < seconds:
            own.due = own.since + math.ceil((seconds - own.seconds) / own.grows)
            self._too_dear[name] = seconds
            return False
        return True

    def pays(self, slot: Slot, name: str, seconds: float, token_s: float) -> bool:
        """Whether a drafter can pay for a trial that takes so long; it does so then."""
        if not self.affords(slot, name, seconds, token_s):
            return False
        if self._adaptive:
            own, left = self._savings[slot.id, name], self._left.get(name, 0.0)
            self._bought.append((own, own.seconds, own.is_tried, name, left))
            self._left[name] = left - max(0.0, seconds - own.seconds)
            own.seconds = max(0.0, own.seconds - seconds)
            own.is_tried = True
        return True

    def paying(self, wants: Sequence[Want], name: str, seconds: float, token_s: float) -> list[Want]:
        """Those wants whose slots can pay for a trial that takes so long; they do so then."""
        if not self._adaptive:
            return [*wants]
        savings, left = self._savings, self._left
        payers = []
        for want in wants:
            # Most cannot, and this is asked for every slot and drafter in every pass.
            slot = want.slot
            own = savings.get((slot.id, name))
            if own is not None and own.lacks(seconds, left.get(name, 0.0), len(slot.tokens)):
                continue
            if self.pays(slot, name, seconds, token_s):
                payers.append(want)
        return payers

    def credit(self, slot: Slot, name: str, n_gained: float, token_s: float) -> None:
        """A draft was verified; n_gained: the drafter's accepted tokens, less what all its tokens' rows cost."""
        own = self._counted(slot, name, 0.0, token_s)
        own.seconds = max(0.0, own.seconds + n_gained * token_s)
        own.gained = max(0.0, own.gained + n_gained * token_s)
        own.has_earned = own.has_earned or n_gained > 0.0
        own.due = 0

    def _counted(self, slot: Slot, name: str, price: float, token_s: float) -> _Savings:
        """The savings with what the text has added. They begin with the drafter's share of a token's time, or less.

        That pays for some useless trials; what drafts have earned pays for four times as many, but not all through a
        text. A trial that costs more can be saved up for.
        """
        n, share_s = len(slot.tokens), token_s / len(slot.speculate.types)
        given_s = share_s * min(1.0, self._earning.get(name, 1.0) / _SHARE_ENOUGH)
        own = self._savings.setdefault((slot.id, name), _Savings(given_s, n))
        own.grows = _SHARE * share_s
        grown = (n - own.since) * own.grows
        own.seconds = min(own.seconds + grown, max(_MOST * share_s, price))
        own.gained += grown
        own.since = n
        return own
