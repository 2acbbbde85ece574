"""Where a drafter's failure stops: it is switched off for the request; after three within ten minutes, for all.

When the first of the three is ten minutes old it is asked again. Where a decision about drafts fails, what it was for
goes without them.

Every call of a drafter's method goes through here, so its figures are kept here as well: calls, seconds, tokens drafted
and accepted, for each request and for all.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from slipstream.engine.device_loss import Spared, raise_if_lost
from slipstream.engine.slot import DrafterTally, Slot
from slipstream.engine.speculate.drafter import Kept, Want

log = logging.getLogger(__name__)

_MOST_FAILURES = 3  # within so many seconds
_RECENT_S = 600.0
_ALARM_AFTER = 500  # drafted tokens of a network
_ALARM_BELOW = 0.05  # accepted share of them

T = TypeVar("T")
OfSlot = TypeVar("OfSlot", Want, Kept)


class Guard:
    """The drafters of a server by name. `suspects`: those whose guesses must often be right (networks)."""

    def __init__(self, names: Sequence[str], suspects: Sequence[str], now: Callable[[], float]) -> None:
        self.totals: Mapping[str, DrafterTally] = {name: DrafterTally() for name in names}
        self._now = now
        self.suspects = frozenset(suspects)
        # When its last failures were.
        self._failures: dict[str, deque[float]] = {}
        self._doubtful: set[str] = set()
        self._warned_of: set[str] = set()
        self._n_spared = 0  # decisions that failed

    @property
    def disabled(self) -> tuple[str, ...]:
        """Drafters that failed too often of late and are not asked."""
        return tuple(name for name in self.totals if self._is_off(name))

    def _is_off(self, name: str) -> bool:
        failures = self._failures.get(name)
        if failures is None or len(failures) < _MOST_FAILURES:
            return False
        return self._now() - failures[0] < _RECENT_S

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Networks whose guesses are so rarely right that something must be wrong with them."""
        return tuple(sorted(self._doubtful))

    def serving(self, slot: Slot) -> AbstractSet[str]:
        """The drafters whose guesses the slot uses; others cost it nothing, not even for its prompt."""
        if not self._failures:
            return slot.drafters
        return {name for name in slot.drafters if not self._is_off(name)}

    def served(self, name: str, several: Sequence[OfSlot]) -> list[OfSlot]:
        """Those of them whose slots use the drafter's guesses."""
        if self._failures and self._is_off(name):
            return []
        return [one for one in several if name in one.slot.drafters]

    def run(self, name: str, verb: str, slots: Sequence[Slot], call: Callable[[], T]) -> T | None:
        """Call a drafter's method `verb`. If it raises, its requests go on without it; the text does not change.

        Raises `DeviceLost`: then nothing goes on.
        """
        started = self._now()
        try:
            return call()
        except Exception as error:
            raise_if_lost(error)
            self._failures.setdefault(name, deque(maxlen=_MOST_FAILURES)).append(started)
            for slot in slots:
                slot.drafters.discard(name)
            log.exception(
                "drafter failed name=%s verb=%s requests=%s off_for_all=%s",
                name,
                verb,
                ",".join(slot.request.id for slot in slots),
                self._is_off(name),
            )
            return None
        finally:
            seconds = self._now() - started
            self.totals[name].call(verb, seconds)
            for slot in slots:
                slot.stats.drafters[name].call(verb, seconds / len(slots))

    def spared(self) -> Spared:
        """What is decided and learnt about drafts runs inside. If it raises, what it was for goes without.

        Raises `DeviceLost`.
        """
        return Spared(self._spare)

    def _spare(self, error: Exception) -> None:
        """Log a failed decision: the first, the tenth and so on, as what fails may do so in every pass."""
        self._n_spared += 1
        if str(self._n_spared).strip("0") == "1":
            told = "a decision about drafts failed, none were made n_failures=%d"
            log.error(told, self._n_spared, exc_info=error)

    def credit(self, name: str, slot: Slot, positions: Sequence[int], n_accepted: int) -> None:
        """Count a verified draft: the places of the drafter's tokens in it, and how many tokens of it were accepted."""
        for tally in (slot.stats.drafters[name], self.totals[name]):
            tally.credit(positions, n_accepted)
        if name in self.suspects:
            self._suspect(name)

    def _suspect(self, name: str) -> None:
        """Warn once of a network that is hardly ever right: it is then nearly always a wrong network."""
        total = self.totals[name]
        if total.n_drafted < _ALARM_AFTER:
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
