"""Guesses watched until the text itself has judged them, whether they were verified or not.

A token that came by any road says whether a guess made for its place was right. So a drafter that loses to another,
or is not verified because nothing pays, is still learnt about, at the cost of a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.decide.survival import Grades, Survival


@dataclass(slots=True)
class _Watched:
    token_ids: Sequence[int]
    grade: Grades  # [n_tokens]
    start: int  # tokens of the slot when the guess was made
    n_judged: int = 0


class Shadows:
    """At most one guess per slot and drafter; a further one is watched when the text has caught up with it."""

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self._watched: dict[int, dict[str, _Watched]] = {}

    def watch(self, slot: Slot, name: str, token_ids: Sequence[int], grade: Grades) -> None:
        """Remember a guess of what follows the slot's tokens, unless an earlier one is still open."""
        own = self._watched.setdefault(slot.id, {})
        if name not in own:
            own[name] = _Watched(token_ids, grade, len(slot.tokens))

    def judge(self, slot: Slot) -> list[str]:
        """Compare what is watched with the tokens that have come since; the drafters that were right to the end."""
        own = self._watched.get(slot.id, {})
        right = []
        for name, one in list(own.items()):
            rest = one.token_ids[one.n_judged :]
            start = one.start + one.n_judged
            came = slot.tokens[start : start + len(rest)]
            if not came:
                continue
            n_right = _common(rest, came)
            n_judged = min(n_right + 1, len(came))
            grade = one.grade[one.n_judged : one.n_judged + n_judged].tolist()
            self._survival.judge(name, slot.id, grade, one.n_judged, n_right)
            one.n_judged += n_judged
            if n_right == n_judged < len(rest):
                continue
            del own[name]
            if n_right == n_judged:
                right.append(name)
        return right

    def drop(self, slot_id: int) -> None:
        """Forget the slot's guesses."""
        self._watched.pop(slot_id, None)


def _common(guessed: Sequence[int], came: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (a, b) in enumerate(zip(guessed, came, strict=False)):
        if a != b:
            return i
    return min(len(guessed), len(came))
