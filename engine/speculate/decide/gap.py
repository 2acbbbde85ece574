"""Whether the host looks at a pass before it launches the next: what that brings in against what it costs.

It costs the gap between the passes, in which the device waits. It brings in what drafters that read text find by the
tokens just picked; of a pass that nobody has read they know only what stood before it. So per slot the tokens that
they brought in are averaged over the passes they were asked for, and weighed against the gap at the rate of plain
decoding. A slot begins with what is usual among requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.engine.speculate.decide.cost import DraftCost

_WEIGHT = 0.1  # of a pass in a slot's average
_USUAL_WEIGHT = 0.02  # of a pass in the average of all
_AT_FIRST = 1.0  # tokens a pass that are taken as usual before there was any: to find out, one has to look
_NOTHING = 0.01  # tokens a pass that count as none


class Gap:
    """The gap's length, and per slot what looking has brought in. Not adaptive: the gap counts as nothing."""

    def __init__(self, *, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._seconds = DraftCost()
        self._gained: dict[int, float] = {}  # by slot: tokens a pass, averaged over those it was looked for
        self._usual = _AT_FIRST  # the same of all slots
        self._asked: set[int] = set()  # slots whose running pass was looked for

    def observe(self, seconds: float) -> None:
        """Learn from one pass that waited for the host."""
        self._seconds.observe(1, seconds)

    def begin(self, slot_id: int) -> None:
        """The slot has another text."""
        self._gained.pop(slot_id, None)
        self._asked.discard(slot_id)

    def ask(self, slot_ids: Iterable[int]) -> None:
        """Drafters that read text are asked for the next pass of these slots."""
        self._asked.update(slot_ids)

    def gain(self, slot_id: int, n_accepted: int) -> None:
        """A pass was verified that kept so many tokens of drafters that read text."""
        if slot_id in self._asked:
            self._asked.remove(slot_id)
            self._gained[slot_id] = _moved(self._gained.get(slot_id, self._usual), n_accepted, _WEIGHT)
            self._usual = _moved(self._usual, n_accepted, _USUAL_WEIGHT)

    def pays(self, slot_ids: Iterable[int], token_s: float) -> bool:
        """Whether looking pays for these slots. token_s: seconds in which plain decoding makes a token."""
        gained_s = token_s * sum(self._gained.get(slot_id, self._usual) for slot_id in slot_ids)
        return gained_s > (self._seconds(1) if self._adaptive else 0.0)


def _moved(average: float, value: float, weight: float) -> float:
    after = average + weight * (value - average)
    return after if after > _NOTHING else 0.0
