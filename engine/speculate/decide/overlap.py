"""Whether the host reads a pass before it launches the next.

Reading costs the gap between the passes, in which the device waits. It gains what text drafters find from the tokens
just picked; behind an unread pass they have only the text before it. So per slot the tokens gained are averaged over
the passes that text drafters were asked for, and weighed against the gap at the rate of plain decoding, less what a
drafter that reads the text on the device finds without the host. A slot begins with the average of all requests.
"""

from __future__ import annotations

from collections.abc import Iterable

_SLOT_WEIGHT = 0.1  # of a pass in a slot's average
_USUAL_WEIGHT = 0.02  # of a pass in the average of all
_AT_FIRST = 1.0  # tokens a pass assumed before any was counted: high, so that passes are read
_GAP_WEIGHT = 0.1  # of a gap in their average
_HICCUP = 3.0  # times the average that a gap counts for at most
_NOTHING = 0.01  # tokens a pass that count as none


class Overlap:
    """Per slot what reading a pass first has gained."""

    def __init__(self, *, adaptive: bool) -> None:
        """Not adaptive: the gap counts as nothing."""
        self._adaptive = adaptive
        self.gap_s = 0.0  # average seconds that the device has waited for the host; 0: not measured
        self._gained: dict[int, float] = {}  # by slot: tokens a pass, averaged over the passes asked for
        self._usual = _AT_FIRST  # the same of all slots
        self._asked: set[int] = set()  # slots for whose running pass text drafters were asked

    def begin(self, slot_id: int) -> None:
        """The slot has another text."""
        self._gained.pop(slot_id, None)
        self._asked.discard(slot_id)

    def waited(self, seconds: float) -> None:
        """The device has waited for the host between two passes."""
        if not self.gap_s:
            self.gap_s = seconds
        self.gap_s += _GAP_WEIGHT * (min(seconds, _HICCUP * self.gap_s) - self.gap_s)

    def ask(self, slot_ids: Iterable[int]) -> None:
        """Text drafters are asked for the next pass of these slots."""
        self._asked.update(slot_ids)

    def gain(self, slot_id: int, n_accepted: int) -> None:
        """A pass was verified that kept so many tokens of text drafters."""
        if slot_id in self._asked:
            self._asked.remove(slot_id)
            self._gained[slot_id] = _moved(self._gained.get(slot_id, self._usual), n_accepted, _SLOT_WEIGHT)
            self._usual = _moved(self._usual, n_accepted, _USUAL_WEIGHT)

    def reads_first(self, slot_ids: Iterable[int], token_s: float, n_spared: float = 0.0) -> bool:
        """Whether reading the pass first pays for these slots.

        token_s: seconds of plain decoding per token; n_spared: tokens expected of the text without reading the pass.
        """
        n_gained = sum(self._gained.get(slot_id, self._usual) for slot_id in slot_ids)
        return token_s * (n_gained - n_spared) > (self.gap_s if self._adaptive else 0.0)


def _moved(average: float, value: float, weight: float) -> float:
    after = average + weight * (value - average)
    return after if after > _NOTHING else 0.0
