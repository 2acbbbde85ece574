"""How many calls of a network are served by the text that it is fed before the first of them.

A network that has not followed a slot lately is fed what it lacks before it can guess: behind a prompt, hundreds of
rows. All guesses that follow rest on them, so their cost is shared by as many calls as requests lately made. That
depends on the traffic: where most requests try a network once and find it wrong, the call pays for all of it; where it
guesses through replies of hundreds of tokens, next to nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from slipstream.engine.slot import Slot

_AT_FIRST = 4.0  # calls assumed of a request before any has ended
_OF_LAST = 0.1  # of the last request in the average


class Feeding:
    """Calls of every (slot, drafter), and how many requests lately made: their geometric mean, as a few make most."""

    def __init__(self) -> None:
        self._calls: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by slot id and drafter
        self._usual: dict[str, float] = {}  # by drafter

    def begin(self, slot_id: int) -> None:
        """The slot has another text."""
        for name, n_calls in self._calls.pop(slot_id, {}).items():
            usual = self.n_calls(name)
            self._usual[name] = usual * (n_calls / usual) ** _OF_LAST

    def called(self, name: str, slots: Iterable[Slot]) -> None:
        """A drafter guesses for these slots."""
        for slot in slots:
            self._calls[slot.id][name] += 1

    def n_calls(self, name: str) -> float:
        """Calls of a drafter that what it is fed of a slot is expected to serve."""
        return self._usual.get(name, _AT_FIRST)
