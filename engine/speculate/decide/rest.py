"""Passes in which nothing about drafts is decided, because nothing can have changed.

Where no drafter was asked for a pass, the savings of its slots say when the next trial can be paid for (`trials.py`),
and networks are weighed once a period (`asking.py`). Until then the same slots would have the same answer, and to find
it takes a tenth of the time in which a small model makes a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.decide.account import Account
from slipstream.engine.speculate.decide.trials import Allowance
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import Want


class Rest:
    """Whether the last decision stands."""

    def __init__(self, account: Account, allowance: Allowance) -> None:
        self._account, self._allowance = account, allowance
        # The pass that was decided last, and who asked: its number among all passes, and its period.
        self._asking: tuple[Pass, list[Slot]] | None = None
        self._since = self._period = 0

    def holds(self, wants: Sequence[Want], coming: Pass) -> bool:
        """Whether the coming pass has no drafts, as the one before it; if not, it is decided."""
        asking = coming, [want.slot for want in wants]
        n_passes, period = self._account.n_passes, self._account.period
        is_over = n_passes >= self._since + self._allowance.wait or period != self._period
        if self._account.is_idle and asking == self._asking and not is_over:
            return True
        self._asking, self._since, self._period = asking, n_passes, period
        return False

    def end(self) -> None:
        """A drafter promises more than it did."""
        self._asking = None
